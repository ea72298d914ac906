"""The store in a file of this machine, with a write-ahead log: readers and a writer don't wait for each other.

A commit is synced to disk, so it survives a power failure. The file must be on a disk of this machine: NFS can't share the
log.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from footplate.core.errors import Unavailable
from footplate.jobs.store import tables
from footplate.jobs.store.database import Execute, T

# The longest wait for another process's transaction. Each takes milliseconds.
BUSY_S = 60.0


class SQLite:
    """A `Database` in a file, which is created.

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
        tables.create(self, "SELECT 1 FROM sqlite_master WHERE name = ?")

    def _log_ahead(self) -> None:
        """Switch the file to a write-ahead log.

        SQLite doesn't wait here: if several processes open a new file at once, all but one get an error that it is locked.
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
                result = work(self._execute)
                self._connection.execute("COMMIT")
            except BaseException:
                # Some errors, such as a full disk, have ended the transaction already.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._unusable(error) from None
        return result

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
            f"{self._path}, the store of jobs, can't be used: {error}. Free space, repair its permissions, or set "
            "FOOTPLATE_HOME to a folder on a disk of this machine."
        )
