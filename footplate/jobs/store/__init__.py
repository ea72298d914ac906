"""Where jobs are remembered: durable, checked, and the same on SQLite and PostgreSQL.

    tables.py    the tables, in SQL that both understand
    database.py  what the store needs of a database: transactions that may be repeated
    sqlite.py    a file in the home folder: the default
    postgres.py  a server, which a team shares
    jobs.py      Store: jobs, transitions, processes

Every transition is one transaction which checks the state that it comes from, so of two who want the same one gets it.
"""

from __future__ import annotations

from footplate.jobs.home import Home
from footplate.jobs.store.jobs import Store


def open_store(home: Home, patience_s: float = 60.0) -> Store:
    """The store of a home.

    Args:
        home: which.
        patience_s: how long a server that is away is waited for, each time that it is needed.

    Raises:
        ConfigError: its address is none, its file can't be used, or its server doesn't answer.
        MissingExtra: it is on PostgreSQL, whose client is not installed.
    """
    if home.store is None:
        from footplate.jobs.store.sqlite import SQLite

        return Store(SQLite(home.root / "jobs.db"))
    from footplate.jobs.store.postgres import Postgres

    return Store(Postgres(home.store, patience_s))
