"""The store on a PostgreSQL server, `FOOTPLATE_STORE=postgresql://…`, which a team's machines share.

Each machine runs the jobs that were submitted on it; everybody sees, and may cancel, all of them. A server that restarts or
can't be reached for a while is waited for: supervisors ask all the time, and a job must not die of it.
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
VANISHED_MS = 10_000  # without an acknowledgement; else a machine that is switched off is waited for, for minutes
_PAUSE_S = 0.5
_LOCK = 0x466F6F74  # of the one who makes the tables; any number will do, as long as it is always the same


class Postgres:
    """A `Database` on a server.

    Args:
        url: its address.
        patience_s: how long it is waited for, once it was there.

    Raises:
        ConfigError: the address is none of PostgreSQL's.
        Unavailable: it can't be reached, or refuses us.
        MissingExtra: there is no client for it here.
    """

    def __init__(self, url: str, patience_s: float) -> None:
        if urlsplit(url).scheme not in ("postgresql", "postgres"):
            raise ConfigError(
                "FOOTPLATE_STORE: expected postgresql://USER@HOST/DATABASE; without it, jobs are kept in a file."
            )
        self._psycopg: Any = require("psycopg", "postgres", "A store of jobs on PostgreSQL")
        self._url = url
        self._place = self._shown(url)
        self._patience_s = patience_s
        self._connection: Any = None
        try:
            self._connect()
        except self._psycopg.Error as error:
            raise self._unusable(error) from None
        tables.create(
            self,
            "SELECT 1 FROM information_schema.tables WHERE table_schema = current_schema() "
            "AND table_name = 'schema_version'",
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
        found = self._connection.execute(sql.replace("?", "%s"), values)
        return found.fetchall() if found.description else []

    def _shown(self, url: str) -> str:
        """Host and database, without the password, as the client's own library understands the address."""
        try:
            found = self._psycopg.conninfo.conninfo_to_dict(url)
        except self._psycopg.ProgrammingError:  # which repeats what it doesn't understand: it may be of the password
            found = {"host": "@"}
        place = f"{found.get('host', 'localhost')}/{found.get('dbname', '')}"
        if "@" in place:
            raise ConfigError(
                "FOOTPLATE_STORE can't be read as an address. In a password write %40 for @, %2F for /, %25 for %."
            )
        return place

    def _unusable(self, error: Exception) -> Unavailable:
        return Unavailable(
            f"the store of jobs at {self._place} (FOOTPLATE_STORE) can't be used: "
            f"{' '.join(str(error).split())}. Is the server there, and may this user connect?"
        )
