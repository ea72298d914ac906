"""Filters and orders of a list of jobs, in gcloud's syntax.

The command line and the server use the same ones.

state=RUNNING AND labels.team=vision      =, !=          is, is not; case doesn't matter in states
jobId:flowers_*                           :              matches, with * for anything; case doesn't matter
createTime>2026-01-31T12:00               <, <=, >, >=   of times, priority and attempt
~startTime,jobId                          ~              turns an order round
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from footplate.core.errors import ConfigError, did_you_mean
from footplate.jobs.states import State
from footplate.jobs.store.jobs import Store, Summary

KEYS = {
    "jobId": "name", "state": "state", "createTime": "created", "startTime": "started", "endTime": "ended", "host": "host",
    "backend": "backend", "priority": "priority", "attempt": "attempt",
}  # fmt: skip
_TIMES = ("created", "started", "ended")
_NUMBERS = ("priority", "attempt")
_PART = re.compile(r"\s*([\w.-]+)\s*(<=|>=|!=|=|:|<|>)\s*(.*?)\s*", re.DOTALL)
_EXPECTED = "expected KEY=VALUE, several with AND between them"

Test = Callable[[Summary], bool]


def select(
    store: Store, wanted: str | None = None, order: str | None = None, limit: int | None = None
) -> tuple[list[Summary], int]:
    """Return the jobs of a list, the newest first unless ordered otherwise, and their number without the limit.

    Args:
        store: the store of the jobs.
        wanted: the filter.
        order: the keys to order by.
        limit: the largest number of jobs to return.

    Raises:
        ConfigError: the filter or the order is wrong.
    """
    if not (wanted or order):
        return store.list(limit=limit), store.count()
    matching = ordered(filter(passes(wanted), store.list()), order)
    return matching[:limit], len(matching)


def passes(text: str | None) -> Test:
    """A filter as a test of a job. Without a filter, every job passes.

    Raises:
        ConfigError: the filter is wrong, names an unknown key, or a value that the key can't have.
    """
    tests = [_test(part) for part in re.split(r"\s+AND\s+", text.strip())] if text and text.strip() else []
    return lambda job: all(test(job) for test in tests)


def ordered(jobs: Iterable[Summary], text: str | None) -> list[Summary]:
    """Order jobs. Without an order, they stay as they are. A job that lacks a time comes last.

    Raises:
        ConfigError: the order names an unknown key.
    """
    result = list(jobs)
    # Sorting is stable, so sorting by the last key first makes the first key decide.
    for part in reversed(text.split(",") if text else []):
        name = part.strip()
        field = _field(name.removeprefix("~"), f'order "{text}":')
        with_value = [job for job in result if getattr(job, field) is not None]
        with_value.sort(key=lambda job, field=field: getattr(job, field), reverse=name.startswith("~"))
        result = with_value + [job for job in result if getattr(job, field) is None]
    return result


def _test(part: str) -> Test:
    origin = f'filter "{part.strip()}":'
    match = _PART.fullmatch(part)
    if match is None or re.search(r"\sOR\s", part):
        raise ConfigError(f"{origin} {_EXPECTED}.")
    key, sign, text = match.groups()
    read = _reader(key, f"{origin} {_EXPECTED}.")
    if text[:1] in ('"', "'") and text[-1:] == text[:1]:
        text = text[1:-1]
    if sign == ":":
        if KEYS.get(key, key) in (*_TIMES, *_NUMBERS):
            raise ConfigError(f"{origin} {key} isn't text; compare it by =, !=, <, <=, > or >=.")
        return lambda job: fnmatchcase(str(read(job) or "").lower(), text.lower())
    wanted = _value(key, sign, text, origin)
    if sign in ("=", "!="):
        return lambda job: (read(job) == wanted) == (sign == "=")
    compare = {"<": "__lt__", "<=": "__le__", ">": "__gt__", ">=": "__ge__"}[sign]
    return lambda job: (value := read(job)) is not None and getattr(float(value), compare)(wanted)


def _reader(key: str, origin: str) -> Callable[[Summary], Any]:
    if key.startswith("labels."):
        return lambda job: json.loads(job.labels).get(key.removeprefix("labels."))
    field = _field(key, origin)
    return lambda job: getattr(job, field)


def _field(key: str, origin: str) -> str:
    # The store's own names work, too.
    if key in KEYS.values():
        return key
    if key not in KEYS:
        raise ConfigError(f"{origin} {did_you_mean(key, [*KEYS, 'labels.NAME'])}")
    return KEYS[key]


def _value(key: str, sign: str, text: str, origin: str) -> Any:
    """The value that a key is compared with."""
    field = KEYS.get(key, key)
    try:
        if field in _TIMES:
            return datetime.fromisoformat(text).timestamp()
        if field in _NUMBERS:
            return float(text)
    except (ValueError, OverflowError, OSError):
        expected = "a number" if field in _NUMBERS else "a time such as 2026-01-31 or 2026-01-31T12:00"
        raise ConfigError(f"{origin} expected {expected}.") from None
    if sign not in ("=", "!="):
        raise ConfigError(f"{origin} {key} has no order; compare it by = or !=.")
    if field == "state":
        if text.upper() not in list(State):
            raise ConfigError(f"{origin} there is no such state. {did_you_mean(text, State)}")
        return State(text.upper())
    return text
