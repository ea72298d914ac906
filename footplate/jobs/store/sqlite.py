"""The store in a file of this machine, with a write-ahead log: readers and the writer don't wait for each other.

A commit is synced to the disk, so it outlasts the machine's sudden end. The file must be on a disk of this machine: over
NFS the log can't be shared.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from footplate.core.errors import Unavailable
from footplate.jobs.store import tables
from footplate.jobs.store.database import Execute, T

BUSY_S = 60.0  # for another's transaction, each of which takes milliseconds


class SQLite:
    """A `Database` in a file, which is made if it isn't there.

    Raises:
        Unavailable: the file can't be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
            path.chmod(0o600)
            self._log_ahead()
            self._connection.execute("PRAGMA synchronous=FULL")
        except (sqlite3.Error, OSError) as error:
            raise self._unusable(error) from None
        tables.create(self, "SELECT 1 FROM sqlite_master WHERE name = 'schema_version'")

    def _log_ahead(self) -> None:
        """Have the file use a write-ahead log.

        SQLite itself doesn't wait here: of several that open a new file at once, all but one are told that it is locked.
        """
        end = time.monotonic() + BUSY_S
        while self._execute("PRAGMA journal_mode") != [("wal",)]:
            try:
                self._execute("PRAGMA journal_mode=WAL")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def transaction(self, work: Callable[[Execute], T]) -> T:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                found = work(self._execute)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # of some errors, such as a full disk, it ends by itself
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._unusable(error) from None
        return found

    def read(self, sql: str, *values: object) -> list[tuple[object, ...]]:
        try:
            return self._execute(sql, *values)
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def close(self) -> None:
        self._connection.close()

    def _execute(self, sql: str, *values: object) -> list[tuple[object, ...]]:
        return self._connection.execute(sql, values).fetchall()

    def _unusable(self, error: Exception) -> Unavailable:
        return Unavailable(
            f"{self._path}, the store of jobs, can't be used: {error}. Free space, mend its permissions, or set "
            "FOOTPLATE_HOME to a folder on a disk of this machine."
        )
