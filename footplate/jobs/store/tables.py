"""The tables of the store. Both databases read `DOUBLE PRECISION` as a double. JSON is text: no query looks into it."""

from __future__ import annotations

from footplate.core.errors import ConfigError
from footplate.jobs.store.database import Database, Execute

VERSION = 1

_TABLES = (
    """CREATE TABLE jobs (
        name TEXT PRIMARY KEY, state TEXT NOT NULL, created DOUBLE PRECISION NOT NULL, queued DOUBLE PRECISION NOT NULL,
        started DOUBLE PRECISION, ended DOUBLE PRECISION, host TEXT NOT NULL, backend TEXT NOT NULL,
        priority INTEGER NOT NULL, attempt INTEGER NOT NULL, failures INTEGER NOT NULL, losses INTEGER NOT NULL,
        cause TEXT NOT NULL, cpus DOUBLE PRECISION NOT NULL, gpus INTEGER NOT NULL, memory_gb DOUBLE PRECISION NOT NULL,
        devices TEXT NOT NULL, plan TEXT NOT NULL, spec TEXT NOT NULL, labels TEXT NOT NULL, owner TEXT)""",
    "CREATE INDEX jobs_by_state ON jobs (state, host)",
    "CREATE INDEX jobs_by_age ON jobs (created)",
    """CREATE TABLE transitions (
        job TEXT NOT NULL, number INTEGER NOT NULL, source TEXT, target TEXT NOT NULL, at DOUBLE PRECISION NOT NULL,
        attempt INTEGER NOT NULL, cause TEXT NOT NULL, PRIMARY KEY (job, number))""",
    """CREATE TABLE processes (
        job TEXT NOT NULL, attempt INTEGER NOT NULL, role TEXT NOT NULL, position INTEGER NOT NULL, pid BIGINT NOT NULL,
        mark DOUBLE PRECISION NOT NULL, began DOUBLE PRECISION NOT NULL, ended DOUBLE PRECISION, outcome TEXT NOT NULL,
        PRIMARY KEY (job, attempt, role, position))""",
    "CREATE TABLE schema_version (version INTEGER NOT NULL)",
)
# Stores of version 1 may lack these tables. They are added, and a Footplate that doesn't know them ignores them.
_TRIALS = """CREATE TABLE trials (
        tuning TEXT NOT NULL, number INTEGER NOT NULL, job TEXT NOT NULL, state TEXT NOT NULL, parameters TEXT NOT NULL,
        measurements TEXT NOT NULL, value DOUBLE PRECISION, step DOUBLE PRECISION, created DOUBLE PRECISION NOT NULL,
        ended DOUBLE PRECISION, cause TEXT NOT NULL, PRIMARY KEY (tuning, number))"""
_FORKS = """CREATE TABLE forks (
        tuning TEXT NOT NULL, number INTEGER NOT NULL, parent INTEGER NOT NULL, step DOUBLE PRECISION NOT NULL,
        replaces INTEGER NOT NULL, PRIMARY KEY (tuning, number))"""
_ADDED = {"trials": _TRIALS, "forks": _FORKS}


def create(database: Database, there: str, *before: str) -> None:
    """Create the tables, unless they exist.

    Args:
        database: the database.
        there: a query for the name of a table, which returns a row if the table exists.
        before: statements that keep other processes from creating them at the same time.

    Raises:
        ConfigError: another version of Footplate created them.
    """

    def make(execute: Execute) -> None:
        for statement in before:
            execute(statement)
        if not execute(there, "schema_version"):
            for statement in _TABLES:
                execute(statement)
            execute("INSERT INTO schema_version VALUES (?)", VERSION)
        for name, statement in _ADDED.items():
            if not execute(there, name):
                execute(statement)

    # The query first: a transaction would wait for another writer.
    if not all(database.read(there, name) for name in ("schema_version", *_ADDED)):
        database.transaction(make)
    if (version := database.read("SELECT version FROM schema_version")[0][0]) != VERSION:
        raise ConfigError(
            f"the store of jobs has version {version}; this Footplate expects version {VERSION}. Use the Footplate that "
            "created it, or set FOOTPLATE_HOME to another folder."
        )
