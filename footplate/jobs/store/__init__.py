"""The store of jobs: durable, checked, and the same on SQLite and PostgreSQL.

    tables.py    the tables, in SQL for both databases
    database.py  what the store needs of a database: transactions that can be repeated
    sqlite.py    a file in the home folder: the default
    postgres.py  a server that a team shares
    jobs.py      Store: jobs, transitions, processes
    trials.py    the trials of tunings

A transition is one transaction that checks the state it comes from. So if two processes want the same transition, one of
them gets it.
"""

from __future__ import annotations

from footplate.jobs.home import Home
from footplate.jobs.store.jobs import Store


def open_store(home: Home, patience_s: float = 60.0) -> Store:
    """Open the store of a home.

    Args:
        home: the home.
        patience_s: how long to wait for an unreachable server, in each operation.

    Raises:
        ConfigError: the address is wrong, the file can't be used, or the server doesn't answer.
        MissingExtra: the client for PostgreSQL isn't installed.
    """
    if home.store is None:
        from footplate.jobs.store.sqlite import SQLite

        return Store(SQLite(home.root / "jobs.db"))
    from footplate.jobs.store.postgres import Postgres

    return Store(Postgres(home.store, patience_s))
