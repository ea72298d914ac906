"""The version of a Delta table: by number, or by time, as the newest version that existed then.

    version=12, version="12"                    a number
    version="2024-05-01T12:00:00+02:00"         a time, ISO 8601; local time of this machine if it has no zone
    version="2024-05-01", version=date(…)       the beginning of that day
    version=datetime(…)                         a time; local time if it has no zone

The time of a version is when the file of its commit was written, as for every reader of Delta tables. Copying a table
changes it. Tables with in-commit timestamps have it in the commit itself. A time before the oldest version is refused.
So is a time in the future, which could mean another version tomorrow.
"""

from __future__ import annotations

import bisect
import json
import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, date, datetime, time
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from footplate.core.errors import DataError

Version = int | str | date | datetime | None

_pinned: ContextVar[Mapping[str, int] | None] = ContextVar("footplate_pinned_versions", default=None)


@contextmanager
def pinned(versions: Mapping[str, int]) -> Iterator[None]:
    """Open Delta tables at these versions inside the block, where no version is given.

    Args:
        versions: version numbers by the full address of a table; see `full_address`.
    """
    token = _pinned.set(versions)
    try:
        yield
    finally:
        _pinned.reset(token)


def pinned_version(address: str | None) -> int | None:
    """Return the version of a table inside a `pinned` block; None for the newest."""
    return (_pinned.get() or {}).get(address or "")


_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\..*parquet")


def number_of(uri: str, table: Any, version: Version, filesystem: pafs.FileSystem, path: str) -> int:
    """Return the number of a version.

    Args:
        uri: the table as the user named it, for messages.
        table: delta-rs's table, at its newest version.
        version: a number or a time; None means the newest.
        filesystem: pyarrow's file system.
        path: the table's path within `filesystem`.

    Raises:
        DataError: there is no such version, or it is neither a number nor a time.
    """
    newest = table.version()
    if version is None:
        return newest
    parsed = _parse(uri, version, newest)
    if isinstance(parsed, int):
        if not 0 <= parsed <= newest:
            raise DataError(f"{uri}: there is no version {parsed}; there are 0 to {newest}.")
        return parsed
    return _number_at(uri, table, parsed, filesystem, f"{path}/_delta_log")


def _parse(uri: str, version: Any, newest: int) -> int | datetime:
    """Parse a version: a number, or a time with a zone."""
    if isinstance(version, str) and re.fullmatch(r"-?[0-9]{1,18}", version):
        return int(version)
    if isinstance(version, str):
        try:
            version = datetime.fromisoformat(version)
        except ValueError as error:
            raise _invalid(uri, version, newest) from error
    if isinstance(version, date):
        moment = version if isinstance(version, datetime) else datetime.combine(version, time())
        return moment.astimezone() if moment.tzinfo is None else moment

    # A bool is an int for Python.
    if isinstance(version, bool):
        raise _invalid(uri, version, newest)
    try:
        return operator.index(version)
    except TypeError as error:
        raise _invalid(uri, version, newest) from error


def _invalid(uri: str, version: Any, newest: int) -> DataError:
    return DataError(
        f"{uri}: version={version!r} is neither a number from 0 to {newest} nor a time. Expected an integer, a "
        'datetime, or an ISO 8601 string such as "2024-05-01T12:00:00+02:00".'
    )


def _number_at(uri: str, table: Any, moment: datetime, filesystem: pafs.FileSystem, log: str) -> int:
    """Return the newest version that existed at `moment`."""
    if moment > datetime.now(UTC):
        raise DataError(
            f"{uri}: version={moment.isoformat()!r} is in the future, so it could still mean another version. Leave "
            "version= "
            "out for the newest version."
        )
    written = _commits(uri, filesystem, log)
    if not written:
        raise DataError(f"{uri}: its log has no commits any more, so it can't be opened by time. Give a number.")
    configuration = table.metadata().configuration
    in_commit = configuration.get("delta.enableInCommitTimestamps") == "true"
    since = int(configuration.get("delta.inCommitTimestampEnablementVersion", 0))

    def when(version: int) -> datetime:
        if in_commit and version >= since:
            return _in_commit(filesystem, log, version)
        return written[version]

    versions = list(written)
    at = bisect.bisect_right(versions, moment, key=when)
    if at == 0:
        first = when(versions[0]).astimezone(moment.tzinfo)
        raise DataError(
            f"{uri}: there was no version yet at {moment.isoformat()}: the oldest version, version {versions[0]}, was "
            f"written at {first.isoformat()}. Give a later time, or a number."
        )
    return versions[at - 1]


def _commits(uri: str, filesystem: pafs.FileSystem, log: str) -> dict[int, datetime]:
    """Return when each readable version was written. No version is older than the version before it."""
    try:
        infos = filesystem.get_file_info(pafs.FileSelector(log))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{uri}: its Delta log can't be listed ({error}).") from error
    commits = {int(match[1]): info.mtime for info in infos if (match := _COMMIT.fullmatch(info.base_name))}
    checkpoints = [int(match[1]) for info in infos if (match := _CHECKPOINT.fullmatch(info.base_name))]
    readable_from = 0 if 0 in commits or not checkpoints else min(checkpoints)
    written: dict[int, datetime] = {}
    latest = datetime.min.replace(tzinfo=UTC)
    for version in sorted(version for version in commits if version >= readable_from):
        latest = written[version] = max(latest, commits[version])
    return written


def _in_commit(filesystem: pafs.FileSystem, log: str, version: int) -> datetime:
    with filesystem.open_input_stream(f"{log}/{version:020}.json") as file:
        first_line = file.read().split(b"\n", 1)[0]
    return datetime.fromtimestamp(json.loads(first_line)["commitInfo"]["inCommitTimestamp"] / 1000, UTC)
