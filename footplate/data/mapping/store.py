"""The results of one function for the rows of one table, in a directory that processes and runs share.

    CACHE/mapped-KEY/00000017    the results for row group 17: an Arrow file, and a checksum
    CACHE/mapped-KEY/complete    the columns, and the size and hash of each row group's results. Written last
    CACHE/mapped-KEY/lock        locked (flock) by the process that computes. Other processes wait, then find the results

KEY is a hash of the rows, of the function and of everything that the function reads. So a directory has one content, and no
file in it ever changes.

A file is written under another name and renamed. So a process that is killed leaves complete files only. Nothing is synced
to disk: after a power failure, a file may have lost bytes. Each file ends with the CRC-32 of its key, its name and its
bytes. A file that is damaged, or that belongs elsewhere, is deleted when it is read, and counts as missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from footplate.core.errors import DataError
from footplate.core.hashing import hashed
from footplate.data.sources.value_hash import hash_table

_CHECKSUM_BYTES = 4
_COMPLETE = "complete"


@dataclass(frozen=True)
class GroupResults:
    """Description of the results for a row group.

    Attributes:
        num_rows: the number of selected rows.
        nbytes: the size of each column in memory.
        nulls: the number of nulls of each column.
        content: a hash of all values.
    """

    num_rows: int
    nbytes: dict[str, int]
    nulls: dict[str, int]
    content: str


@dataclass(frozen=True)
class Results:
    """Description of all results.

    Attributes:
        schema: the columns. A row group without a value of a column has it as nulls of no type.
        groups: the results for each row group.
        file_bytes: the size of each row group's file.
    """

    schema: pa.Schema
    groups: list[GroupResults]
    file_bytes: list[int]

    @functools.cached_property
    def content(self) -> str:
        """A hash of all values."""
        return hashed(str(self.schema), [group.content for group in self.groups])


def describe(rows: pa.Table) -> GroupResults:
    """Describe the results for a row group."""
    columns = list(zip(rows.column_names, rows.columns, strict=True))
    nbytes = {name: column.nbytes for name, column in columns}
    nulls = {name: column.null_count for name, column in columns}
    return GroupResults(rows.num_rows, nbytes, nulls, hash_table(rows))


def unified(schemas: list[pa.Schema]) -> pa.Schema:
    """Return the columns of several results. A column that is empty in some of them has the type of the others.

    Raises:
        DataError: they differ in their columns, or in the type of one.
    """
    for schema in schemas[1:]:
        if schema.names != schemas[0].names:
            raise DataError(
                f"The function returned columns {', '.join(schema.names)}, and before {', '.join(schemas[0].names)}. "
                "Return the same columns for all rows, in the same order."
            )
    try:
        return pa.unify_schemas(schemas, promote_options="default")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            f"The function returned values of different types in one column ({error}). Return the same types for all rows."
        ) from error


def to_bytes(rows: pa.Table, compression: str | None = "zstd") -> bytes:
    """Return a table as the bytes of an Arrow file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(rows)
    return sink.getvalue().to_pybytes()


def from_bytes(content: bytes) -> pa.Table:
    """Return the table of `to_bytes`."""
    return pa.ipc.open_file(pa.py_buffer(content)).read_all()


def read_schema(content: bytes) -> pa.Schema:
    """Return the columns of the table of `to_bytes`."""
    return pa.ipc.open_file(pa.py_buffer(content)).schema


class MappedStore:
    """The directory of some results. Several threads and processes may use it at once.

    Args:
        cache: the directory of all results.
        key: a hash of everything that the results depend on.
    """

    def __init__(self, cache: str | os.PathLike[str], key: str) -> None:
        self.cache, self.key = str(Path(cache).absolute()), key
        self.directory = Path(self.cache) / f"mapped-{key}"

    def results(self) -> Results | None:
        """Return the description of all results; None if they were never complete."""
        stored = self._load(_COMPLETE)
        if stored is None:
            return None
        described = json.loads(stored)
        schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(described["schema"])))
        return Results(schema, [GroupResults(**group) for group in described["groups"]], described["file_bytes"])

    def missing(self, results: Results) -> list[int]:
        """Return the row groups whose file is missing, or isn't as long as it was."""
        sizes = self._sizes()
        return [group for group, nbytes in enumerate(results.file_bytes) if sizes.get(group) != nbytes]

    def keep_results(self, schema: pa.Schema, groups: list[GroupResults]) -> Results:
        """Write the description of all results, whose files are all there."""
        sizes = self._sizes()
        results = Results(schema, groups, [sizes[group] for group in range(len(groups))])
        described = {
            "schema": schema.serialize().to_pybytes().hex(),
            "groups": [asdict(group) for group in groups],
            "file_bytes": results.file_bytes,
        }
        self._keep(_COMPLETE, json.dumps(described).encode())
        return results

    def group(self, group: int) -> pa.Table | None:
        """Read the results for a row group; None if they are missing. A damaged file is deleted."""
        content = self._load(_name(group))
        return None if content is None else from_bytes(content)

    def keep_group(self, group: int, content: bytes) -> None:
        """Write the results for a row group.

        Args:
            group: its number.
            content: the results, by `to_bytes`.

        Raises:
            DataError: the directory can't be written, or the disk is full.
        """
        self._keep(_name(group), content)

    @contextlib.contextmanager
    def lock(self, waiting: Callable[[], Any]) -> Iterator[None]:
        """Hold the lock of the directory. It is made if it doesn't exist.

        Args:
            waiting: is called if another process holds the lock.

        Raises:
            DataError: the directory can't be written.
        """
        with self._writable():
            self.directory.mkdir(parents=True, exist_ok=True)
            file = (self.directory / "lock").open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            # Only the process with the lock writes. So this is what a killed process has left.
            for unfinished in self.directory.glob("*.new"):
                unfinished.unlink()
            yield

    def _sizes(self) -> dict[int, int]:
        """Return the size of the file of each row group."""
        entries = (entry for entry in os.scandir(self.directory) if entry.name.isdigit())
        return {int(entry.name): entry.stat().st_size for entry in entries}

    def _load(self, name: str) -> bytes | None:
        path = self.directory / name
        try:
            stored = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DataError(f"{path}: can't be read ({error.strerror or error}). Check the disk.") from error
        content = stored[:-_CHECKSUM_BYTES]
        if stored[-_CHECKSUM_BYTES:] == self._checksum(name, content):
            return content
        path.unlink(missing_ok=True)
        return None

    def _keep(self, name: str, content: bytes) -> None:
        new = self.directory / f"{name}.new"
        with self._writable():
            try:
                with new.open("wb") as file:
                    file.write(content)
                    file.write(self._checksum(name, content))
                new.replace(self.directory / name)
            except OSError:
                new.unlink(missing_ok=True)
                raise

    def _checksum(self, name: str, content: bytes) -> bytes:
        return zlib.crc32(content, zlib.crc32(f"{self.key}/{name}".encode())).to_bytes(_CHECKSUM_BYTES, "little")

    @contextlib.contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"cache={self.cache!r} can't be used ({error.strerror or error}). Give a writable local directory with "
                "room. The results in it are kept."
            ) from error


def _name(group: int) -> str:
    return f"{group:08}"
