"""A job before it is checked: the file's values with the flags' values laid over them, and the origin of each.

A flag replaces the value of its key. `--labels` adds to the file's labels.
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
    """An unchecked job.

    Attributes:
        values: the merged mapping, as `model.Job` takes it.
        origins: the flag of each key that a flag set.
        document: the file; None if there is none.
        partial: flags may still follow, so a key that a submission needs may be missing.
    """

    values: dict[str, Any]
    origins: dict[Path, str] = field(default_factory=dict)
    document: Document | None = None
    partial: bool = False

    def place(self, path: Path) -> str:
        """The flag or the line that sets a key; empty if none does."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        if self.document is None or not _leads_somewhere(path, self.document):
            return ""
        return self.document.place(path)

    def problem(self, path: Path, text: str) -> Problem:
        """Make a problem for a key of this draft."""
        return Problem(path, text, self.place(path))


def draft(
    document: Document | None = None,
    options: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    name: str | None = None,
    partial: bool = False,
) -> Draft:
    """Lay flags over a file.

    Args:
        document: the file.
        options: flags of `flags.KEYS`, and their values.
        args: the program's arguments from the command line; they replace the file's.
        name: the job's name.
        partial: as `Draft.partial`.

    Raises:
        ConfigError: a flag has a wrong form, or the command line contains bytes that aren't text.
    """
    for flag, text in (options or {}).items():
        _check_text(f"--{flag}", text)
    for text in args:
        _check_text("after --", text)
    _check_text("the job's name", name or "")
    values = _without_nothing(document.values) if document else {}
    new, origins = flags.to_values(options or {})
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
    """Set a key, and create the mappings that lead to it."""
    home = values
    for part in path[:-1]:
        inner = home.get(str(part))
        # The file has a mistake here. The flag's value replaces it.
        if not isinstance(inner, dict):
            inner = home[str(part)] = {}
        home = inner
    home[str(path[-1])] = value


def _check_text(origin: str, text: str) -> None:
    """Refuse bytes from the shell that aren't text: neither a spec nor a message can contain them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{origin}: {text!r} isn't UTF-8 text.") from None


def _without_nothing(values: Any) -> Any:
    """Copy values without the keys that have no value."""
    if isinstance(values, dict):
        return {key: _without_nothing(value) for key, value in values.items() if value is not None}
    return [_without_nothing(value) for value in values] if isinstance(values, list) else values


def _leads_somewhere(path: Path, document: Document) -> bool:
    return any(path[:length] in document.lines for length in range(1, len(path) + 1))
