"""Rewrite a spec for machines that still exist. Everything else stays as it is.

`changes` lists the keys that change, with their new values. `apply` sets them in a draft, for a submission. `rewrite` sets
them in the text of a config.yaml, and keeps its comments, order and quotes: it replaces a value in place, and inserts a new
key in the line after the key that it belongs to.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import yaml

from footplate.catalog.successors import today
from footplate.core.errors import ConfigError
from footplate.jobs.spec.document import Document
from footplate.jobs.spec.draft import Draft, draft, put
from footplate.jobs.spec.model import Job
from footplate.jobs.spec.problems import Path, dotted
from footplate.jobs.spec.resolving import checked
from footplate.jobs.spec.scaling import key_of, replicas, tier_of
from footplate.jobs.spec.yamlfile import nodes, parse

_INPUT = "trainingInput"


@dataclass(frozen=True)
class Change:
    """A key and its new value.

    Attributes:
        path: the key.
        value: the new value.
        after: a new key is inserted after this one.
    """

    path: Path
    value: str | int
    after: Path

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.value}"


def changes(job: Job) -> list[Change]:
    """The changes that a job needs to run on machines that still exist."""
    spec = job.training_input
    before = replicas(spec)
    after = {replica.role: today(replica.machine) for replica in before}
    if all(after[replica.role] == replica.machine for replica in before):
        return []

    edits: list[Change] = []
    tier = (_INPUT, "scaleTier")
    named = tier_of(spec) == "CUSTOM"
    if not named:
        edits.append(Change(tier, "CUSTOM", tier))
    # A new key comes right after the key it belongs to, before the new keys that were added there earlier.
    for replica in reversed(before):
        new, kind, own = (
            after[replica.role],
            (_INPUT, key_of(replica.role, "Type")),
            (_INPUT, key_of(replica.role, "Config")),
        )
        if named and new == replica.machine:
            continue
        if not named or new.machine != replica.machine.machine:
            edits.append(Change(kind, new.machine, tier))
        if not named and replica.role != "master":
            edits.append(Change((_INPUT, key_of(replica.role, "Count")), replica.count, kind))

        if new.accelerator:
            home = (*own, "acceleratorConfig")
            edits += [Change((*home, "type"), new.accelerator, kind), Change((*home, "count"), new.count, kind)]
    return edits


def apply(asked: Draft) -> Draft:
    """Change a draft, so that its machines exist.

    Raises:
        SpecError: it has problems before the change.
    """
    values = copy.deepcopy(asked.values)
    for change in changes(checked(asked)):
        put(values, change.path, change.value)
    return replace(asked, values=values)


def rewrite(document: Document) -> tuple[str, list[Change]]:
    """Rewrite the text of a config.yaml for machines that exist. Returns the text and the changes.

    Raises:
        SpecError: it has problems before the change.
        ConfigError: the file's layout can't be changed line by line.
    """
    asked = draft(document, partial=True)
    edits = changes(checked(asked))
    text = document.text
    for change in edits:
        text = _set(parse(text, document.name), change)
    wanted = replicas(checked(apply(asked)).training_input)
    if replicas(checked(draft(parse(text, document.name), partial=True)).training_input) != wanted:
        raise ConfigError(f"{document.name} can't be changed line by line. Set: {'; '.join(map(str, edits))}")
    return text, edits


def _set(document: Document, change: Change) -> str:
    """Set one key in the text."""
    there = {path: (key, value) for path, key, value in nodes(document.root)} if document.root else {}
    text, path = document.text, change.path
    write = json.dumps if _is_json(document.root) else str
    if path in there and isinstance(there[path][1], yaml.ScalarNode):
        value = there[path][1]
        space = " " if value.start_mark.index == there[path][0].end_mark.index + 1 else ""
        return _spliced(text, value.start_mark.index, value.end_mark.index, f"{space}{write(change.value)}")
    depth = max(length for length in range(len(path)) if length == 0 or path[:length] in there)
    home, new = there.get(path[:depth], (None, document.root))[1], path[depth:]
    # The key has no value.
    if isinstance(home, yaml.ScalarNode):
        return _spliced(text, home.end_mark.index, home.end_mark.index, f" {{{_flow(new, change.value, write)}}}")
    if not isinstance(home, yaml.MappingNode):
        raise ConfigError(f"{document.name} line {document.lines.get(path[:depth], 1)}: set {change} by hand.")
    anchor = there.get(change.after, (None, None))[1] if len(change.after) == depth + 1 else None
    if home.flow_style:
        if anchor is not None:
            return _spliced(text, anchor.end_mark.index, anchor.end_mark.index, f", {_flow(new, change.value, write)}")
        at, comma = home.start_mark.index + 1, ", " if home.value else ""
        return _spliced(text, at, at, f"{_flow(new, change.value, write)}{comma}")
    first = home.value[0][0].start_mark
    line = anchor.end_mark.line + 1 if anchor is not None else first.line
    return _insert_line(text, line, _block(new, change.value, first.column))


def _spliced(text: str, start: int, end: int, new: str) -> str:
    return text[:start] + new + text[end:]


def _insert_line(text: str, line: int, new: str) -> str:
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    return "".join([*lines[:line], new, *lines[line:]])


def _block(path: Sequence[object], value: object, column: int) -> str:
    """A key on lines of its own: `masterConfig:`, `  acceleratorConfig:`, `    count: 4`."""
    last = len(path) - 1
    return "".join(
        f"{' ' * (column + 2 * depth)}{key}:{f' {value}' if depth == last else ''}\n" for depth, key in enumerate(path)
    )


def _flow(path: Sequence[object], value: object, write: Callable[[object], str]) -> str:
    """A key within braces: `masterConfig: {acceleratorConfig: {count: 4}}`."""
    first, *rest = path
    inner = f"{{{_flow(rest, value, write)}}}" if rest else write(value)
    return f"{write(first)}: {inner}"


def _is_json(root: yaml.Node | None) -> bool:
    """Return True if the document's first key is in double quotes, as in JSON."""
    return isinstance(root, yaml.MappingNode) and bool(root.value) and root.value[0][0].style == '"'
