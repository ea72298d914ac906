"""`footplate jobs check FILE`: print all problems of a config.yaml. `--modernize` rewrites it for machines that exist."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from footplate.cli.arguments import Parser, make_parser
from footplate.cli.formats import add_format
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace


def parser() -> Parser:
    """The parser of `jobs check`."""
    command = make_parser(
        "jobs check", "Print all problems of a job's config.yaml. The exit code is 1 if there are any."
    )
    command.add_argument("file", help="a config.yaml")
    command.add_argument(
        "--modernize", action="store_true", help="rewrite the file: replace machines that no longer exist"
    )
    add_format(command)
    return command


def run(parsed: Namespace) -> int:
    """Check a file. Returns 1 if it has problems.

    Raises:
        ConfigError: the file can't be read, or can't be rewritten.
    """
    from footplate.cli.formats import show_as
    from footplate.jobs.spec import checking
    from footplate.jobs.spec.draft import draft
    from footplate.jobs.spec.migration import rewrite
    from footplate.jobs.spec.problems import dotted
    from footplate.jobs.spec.resolving import checked, problems
    from footplate.jobs.spec.yamlfile import load

    file, modernize = parsed.file, parsed.modernize
    document = load(file)
    asked = draft(document, partial=True)
    faults = problems(asked)
    notices = [] if faults else checking.notices(checked(asked))
    changed: list[str] = []
    if modernize and not faults:
        text, edits = rewrite(document)
        if edits:
            _replace(Path(file), text)
        changed, notices = [str(change) for change in edits], []
    answer = {
        "file": file,
        "valid": not faults,
        "problems": [
            {"key": dotted(problem.path), "place": problem.place, "problem": problem.text} for problem in faults
        ],
        "notices": notices,
        "changed": changed,
    }
    lines = [*map(str, faults), *notices] or [f"{file}: no problems."]
    if modernize and not faults:
        lines = (
            [f"{file}: changed", *(f"  {change}" for change in changed)] if changed else [f"{file}: needs no change."]
        )
    show_as(parsed.format, answer, lambda: "\n".join(lines))
    return int(bool(faults))


def _replace(path: Path, text: str) -> None:
    """Replace a file's text, completely or not at all, and keep its permissions."""
    import os
    import tempfile

    path = path.resolve()
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        Path(name).chmod(path.stat().st_mode)
        Path(name).replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}.") from None
