r"""Decide which paths `.gitignore` excludes, by git's rules.

The lines of a file are read from last to first, and the first match decides. Files of several directories are read from the
innermost to the outermost. An excluded directory isn't searched, so nothing below it can be included again.

    *.csv        anywhere below                    /data      only next to this .gitignore
    build/       directories only                  docs/*.md  with a slash inside: from this .gitignore's directory
    !keep.csv    included after all                a/**/b     any number of directories in between
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NAME = ".gitignore"


@dataclass(frozen=True)
class Rule:
    """A line: its pattern, relative to the file's directory; does it include; does it match directories only."""

    pattern: re.Pattern[str]
    includes: bool
    directories: bool


@dataclass(frozen=True)
class Rules:
    """A `.gitignore`: its directory, and its lines, last first."""

    directory: Path
    rules: tuple[Rule, ...]


def read(directory: Path) -> list[Rules]:
    """The rules of a directory's own `.gitignore`: a list of one, or an empty list if there is no such file."""
    try:
        text = (directory / NAME).read_text("utf-8", errors="surrogateescape")
    except OSError:
        return []
    rules = [rule for line in text.split("\n") if (rule := _rule(line))]
    return [Rules(directory, tuple(reversed(rules)))]


def above(directory: Path) -> list[Rules]:
    """The rules of the directories above a directory, up to the root of its git repository; outermost first."""
    homes = [directory, *directory.parents]
    root = next((index for index, home in enumerate(homes) if (home / ".git").exists()), None)
    if root is None:
        return []
    return [rules for home in reversed(homes[1 : root + 1]) for rules in read(home)]


def ignored(path: Path, is_directory: bool, all_rules: Sequence[Rules]) -> bool:
    """Return True if a path is excluded by rules, which are given from the outermost to the innermost."""
    for rules in reversed(all_rules):
        relative = path.relative_to(rules.directory).as_posix()
        for rule in rules.rules:
            if (is_directory or not rule.directories) and rule.pattern.fullmatch(relative):
                return not rule.includes
    return False


def _rule(line: str) -> Rule | None:
    line = re.sub(r"(?<!\\) +$", "", line.removesuffix("\r"))
    if not line or line.startswith("#"):
        return None
    includes = line.startswith("!")
    line = line.removeprefix("!")
    directories = line.endswith("/")
    line = line.removesuffix("/")
    anchored = "/" in line
    expression = _translate(line.removeprefix("/"))
    if expression is None:
        return None
    prefix = "" if anchored else "(?:.*/)?"
    return Rule(re.compile(prefix + expression, re.DOTALL), includes, directories)


_PIECES = re.compile(r"^\*\*/|/\*\*/|/\*\*$|\*+|\?|\[[!^]?\]?(?:\\.|[^\]\\])*\]|\\.|.", re.DOTALL)
_SPECIAL = {"**/": "(?:.*/)?", "/**/": "/(?:.*/)?", "/**": "/.+", "?": "[^/]"}


def _translate(pattern: str) -> str | None:
    """The regular expression of a pattern; None if the pattern matches nothing."""
    if not pattern or (pattern.endswith("\\") and not pattern.endswith("\\\\")):
        return None
    pieces = []
    for piece in _PIECES.findall(pattern):
        if piece in _SPECIAL:
            pieces.append(_SPECIAL[piece])
        elif piece.startswith("*"):
            pieces.append("[^/]*")
        elif piece.startswith("[") and len(piece) > 1:
            inside = piece[1:-1]
            negated = inside[:1] in ("!", "^")
            inside = re.sub(r"\\(.)", r"\1", inside[negated:]).replace("\\", r"\\").replace("[", r"\[")
            inside = inside.replace("]", r"\]").replace("^", r"\^").replace("&", r"\&").replace("~", r"\~")
            pieces.append(f"(?!/)[{'^' if negated else ''}{inside}]")
        else:
            pieces.append(re.escape(piece.removeprefix("\\") if len(piece) > 1 else piece))
    try:
        re.compile("".join(pieces))
    except re.error:
        # The pattern has an impossible class, such as [z-a].
        return None
    return "".join(pieces)
