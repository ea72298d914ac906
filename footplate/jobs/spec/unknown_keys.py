"""The message for an unknown key: the nearest known key, or the mapping that has it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from footplate.core.errors import did_you_mean
from footplate.jobs.spec.model import Job
from footplate.jobs.spec.problems import Path
from footplate.jobs.spec.reading import keys, mapping_in


def keys_of(path: Iterable[str | int]) -> list[str]:
    """The keys of the mapping at a path; empty if there is no mapping."""
    kind: type[Any] | None = Job
    for part in path:
        if isinstance(part, str):
            known = keys(kind) if kind else {}
            kind = mapping_in(known[part].hint) if part in known else None
    return list(keys(kind)) if kind else []


def unknown(path: Path) -> str:
    """The message for the unknown key at a path."""
    key, home = str(path[-1]), path[:-1]
    other = {("trainingInput",): (), (): ("trainingInput",)}.get(home)
    if other is not None and key in keys_of(other):
        return f"belongs {'under ' + other[0] if other else 'at the top, beside trainingInput'}, not here."
    hint = did_you_mean(key[:60], keys_of(home))
    return f"there is no such key. {hint.partition('? ')[0]}?" if "? " in hint else f"there is no such key. {hint}"
