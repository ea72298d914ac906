"""A job before it is checked: what the file says with what the flags say laid over it, and where each value came from.

A flag replaces the value of its key, whatever the file has there; `--labels` adds to the file's labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from footplate.core.errors import ConfigError
from footplate.jobs.spec import flags
from footplate.jobs.spec.document import Document
from footplate.jobs.spec.problems import Path, Problem


@dataclass(frozen=True)
class Draft:
    """What was asked for.

    Attributes:
        values: the merged mapping, as `model.Job` takes it.
        origins: the flag of each key that a flag has set.
        document: the file; None when there is none.
        partial: whether flags may still come: a key that submitting needs may be missing.
    """

    values: dict[str, Any]
    origins: dict[Path, str] = field(default_factory=dict)
    document: Document | None = None
    partial: bool = False

    def place(self, path: Path) -> str:
        """Where a key was written: its flag, or its line in the file; empty when it was not."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        if self.document is None or not _leads_somewhere(path, self.document):
            return ""
        return self.document.place(path)

    def problem(self, path: Path, text: str) -> Problem:
        """A problem at a key of this draft."""
        return Problem(path, text, self.place(path))


def draft(
    document: Document | None = None,
    given: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    name: str | None = None,
    partial: bool = False,
) -> Draft:
    """Lay flags over a file.

    Args:
        document: the file.
        given: flags of `flags.KEYS` and what followed them.
        args: the program's arguments from the command line; they replace the file's.
        name: the job's.
        partial: as `Draft.partial`.

    Raises:
        ConfigError: a flag in a form of its own, or bytes on the command line that are no text.
    """
    for flag, text in (given or {}).items():
        _check_text(f"--{flag}", text)
    for text in args:
        _check_text("after --", text)
    _check_text("the job's name", name or "")
    values = _without_nothing(document.values) if document else {}
    new, origins = flags.to_values(given or {})
    if args:
        new["trainingInput", "args"] = list(args)
        origins["trainingInput", "args"] = "after --"
    if name is not None:
        new["jobId",] = name
        origins["jobId",] = "the job's name"
    for path, value in new.items():
        put(values, path, value)
    return Draft(values, origins, document, partial)


def put(values: dict[str, Any], path: Path, value: Any) -> None:
    """Set a key; the mappings that lead to it are made where they are missing."""
    home = values
    for part in path[:-1]:
        inner = home.get(str(part))
        if not isinstance(inner, dict):  # a mistake of the file's, which the flag's value replaces
            inner = home[str(part)] = {}
        home = inner
    home[str(path[-1])] = value


def _check_text(origin: str, text: str) -> None:
    """Refuse bytes that the shell has passed on though they are no text: neither a spec nor a message can hold them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{origin}: {text!r} is no text in UTF-8.") from None


def _without_nothing(values: Any) -> Any:
    """A copy in which keys without a value are left out, as if they were not there."""
    if isinstance(values, dict):
        return {key: _without_nothing(value) for key, value in values.items() if value is not None}
    return [_without_nothing(value) for value in values] if isinstance(values, list) else values


def _leads_somewhere(path: Path, document: Document) -> bool:
    return any(path[:length] in document.lines for length in range(1, len(path) + 1))
