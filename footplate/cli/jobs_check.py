"""`footplate jobs check FILE`: all that is wrong with a config.yaml; `--modernize` rewrites it for today's machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.cli import plain
from footplate.cli.formats import add_format
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace


def parser(kind: Any = plain.Parser) -> Any:
    """The parser of `jobs check`."""
    made = plain.make(
        kind, "jobs check", "Say all that is wrong with a job's config.yaml. Exit code 1 if something is."
    )
    made.add_argument("file", help="a config.yaml")
    made.add_argument(
        "--modernize", action="store_true", help="rewrite the file: today's machines for those that are gone"
    )
    add_format(made)
    return made


def run(given: Namespace) -> int:
    """Check a file; returns 1 when something is wrong with it.

    Raises:
        ConfigError: it can't be read, or not be rewritten.
    """
    from footplate.cli.formats import show_as
    from footplate.jobs.spec import checking
    from footplate.jobs.spec.draft import draft
    from footplate.jobs.spec.migration import rewrite
    from footplate.jobs.spec.problems import dotted
    from footplate.jobs.spec.resolving import checked, problems
    from footplate.jobs.spec.yamlfile import load

    file, modernize = given.file, given.modernize
    document = load(file)
    asked = draft(document, partial=True)
    found = problems(asked)
    notices = [] if found else checking.notices(checked(asked))
    changed: list[str] = []
    if modernize and not found:
        text, made = rewrite(document)
        if made:
            _replace(Path(file), text)
        changed, notices = [str(change) for change in made], []
    answer = {
        "file": file,
        "valid": not found,
        "problems": [{"key": dotted(one.path), "place": one.place, "problem": one.text} for one in found],
        "notices": notices,
        "changed": changed,
    }
    lines = [*map(str, found), *notices] or [f"{file}: nothing is wrong with it."]
    if modernize and not found:
        lines = [f"{file}: changed", *(f"  {one}" for one in changed)] if changed else [f"{file}: is of today already."]
    show_as(given.format, answer, lambda: "\n".join(lines))
    return int(bool(found))


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all, with the permissions that it has."""
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
