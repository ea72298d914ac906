"""The store on a PostgreSQL server, `FOOTPLATE_STORE=postgresql://…`, which the machines of a team share.

Each machine runs the jobs that were submitted on it. Everybody sees all jobs, and may cancel them. The store waits for a
server that restarts or is unreachable for a while: supervisors query it all the time, and a job must not fail because of
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from footplate.core.errors import ConfigError, Unavailable
from footplate.core.optional import require
from footplate.jobs.store import tables
from footplate.jobs.store.database import Execute, T

CONNECT_S = 5
# Without an acknowledgement for this long, a connection is dead. The default takes minutes to notice a switched-off
# machine.
VANISHED_MS = 10_000
_PAUSE_S = 0.5
# The advisory lock for creating the tables: any number, as long as it is always the same.
_LOCK = 0x466F6F74


class Postgres:
    """A `Database` on a server.

    Args:
        url: the server's address.
        patience_s: how long an operation waits for an unreachable server.

    Raises:
        ConfigError: the address isn't one of PostgreSQL.
        Unavailable: the server can't be reached, or refuses the connection.
        MissingExtra: the client isn't installed.
    """

    def __init__(self, url: str, patience_s: float) -> None:
        if urlsplit(url).scheme not in ("postgresql", "postgres"):
            raise ConfigError(
                "FOOTPLATE_STORE: expected postgresql://USER@HOST/DATABASE; without it, jobs are kept in a file."
            )
        self._psycopg: Any = require("psycopg", "postgres", "A store of jobs on PostgreSQL")
        self._url = url
        self._address = self._shown(url)
        self._patience_s = patience_s
        self._connection: Any = None
        try:
            self._connect()
        except self._psycopg.Error as error:
            raise self._unusable(error) from None
        tables.create(
            self,
            "SELECT 1 FROM information_schema.tables WHERE table_schema = current_schema() AND table_name = ?",
            f"SELECT pg_advisory_xact_lock({_LOCK})",
        )

    def transaction(self, work: Callable[[Execute], T]) -> T:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                if self._connection.closed:
                    self._connect()
                with self._connection.transaction():
                    return work(self._execute)
            except (self._psycopg.OperationalError, self._psycopg.errors.DeadlockDetected) as error:
                if time.monotonic() > deadline:
                    raise self._unusable(error) from None
                time.sleep(_PAUSE_S)
            except self._psycopg.Error as error:
                raise self._unusable(error) from None

    def read(self, sql: str, *values: object) -> Sequence[tuple[Any, ...]]:
        return self.transaction(lambda execute: execute(sql, *values))

    def close(self) -> None:
        self._connection.close()

    def _connect(self) -> None:
        self._connection = self._psycopg.connect(
            self._url, autocommit=True, connect_timeout=CONNECT_S, tcp_user_timeout=VANISHED_MS,
            keepalives_idle=5, keepalives_interval=5,
        )  # fmt: skip

    def _execute(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(sql.replace("?", "%s"), values)
        return cursor.fetchall() if cursor.description else []

    def _shown(self, url: str) -> str:
        """Host and database, without the password, as the client's own library parses the address."""
        try:
            parts = self._psycopg.conninfo.conninfo_to_dict(url)
        except self._psycopg.ProgrammingError:
            # The library's message may contain a part of the password, so it isn't shown.
            parts = {"host": "@"}
        address = f"{parts.get('host', 'localhost')}/{parts.get('dbname', '')}"
        if "@" in address:
            raise ConfigError(
                "FOOTPLATE_STORE can't be read as an address. In a password write %40 for @, %2F for /, %25 for %."
            )
        return address

    def _unusable(self, error: Exception) -> Unavailable:
        return Unavailable(
            f"the store of jobs at {self._address} (FOOTPLATE_STORE) can't be used: "
            f"{' '.join(str(error).split())}. Is the server there, and may this user connect?"
        )
