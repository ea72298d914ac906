"""Store: the jobs, what has happened to them, and their processes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from footplate.core.errors import ConfigError
from footplate.jobs.record import Job, Process, Transition
from footplate.jobs.scheduling import Resources, Waiting
from footplate.jobs.states import FINAL, State, may_follow
from footplate.jobs.store.database import Database, Execute

_JSON = ("devices", "plan", "spec", "labels", "owner")
_NEEDS = tuple(one.name for one in fields(Resources))
_PLAIN = tuple(one.name for one in fields(Job) if one.name not in (*_JSON, "needs"))
_COLUMNS = (*_PLAIN, *_NEEDS, *_JSON)
_SUMMARY = "name, state, created, started, ended, host, backend, priority, attempt, cause, labels"


@dataclass(frozen=True, slots=True)
class Summary:
    """A job in a list; see `Job`."""

    name: str
    state: State
    created: float
    started: float | None
    ended: float | None
    host: str
    backend: str
    priority: int
    attempt: int
    cause: str
    labels: str


class UnknownJob(ConfigError):
    """There is no job of this name."""


class WrongState(ConfigError):
    """What is asked doesn't go with a job that is there: not with the state that it is in, or not with its name."""


class Store:
    """Jobs in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def close(self) -> None:
        """End the connection."""
        self._database.close()

    def add(self, job: Job) -> None:
        """Put a new job, in its first state.

        Raises:
            WrongState: there is one of its name.
        """

        def work(execute: Execute) -> float | None:
            if insert(execute, job):
                return job.created
            there = execute("SELECT created FROM jobs WHERE name = ?", job.name)
            return there[0][0] if there else None  # None: deleted just now

        if self._database.transaction(work) != job.created:
            raise WrongState(
                f"there is a job {job.name} already. Choose another name, or delete it: footplate jobs delete {job.name}"
            )

    def find(self, name: str) -> Job:
        """A job.

        Raises:
            UnknownJob: there is none of this name.
        """
        found = self.get(name)
        if found is None:
            from footplate.jobs.catalog.lookup import nearest

            known = [one.name for one in self.list()]
            raise UnknownJob(f'there is no job "{name}".{nearest(name, known)} See: footplate jobs list')
        return found

    def get(self, name: str) -> Job | None:
        """A job; None when there is none of this name."""
        if not name.isascii() or "\0" in name:  # no job has such a name, and databases don't take it
            return None
        found = self._database.read(f"SELECT {', '.join(_COLUMNS)} FROM jobs WHERE name = ?", name)
        return _job(found[0]) if found else None

    def state(self, name: str) -> State | None:
        """A job's state; None of one that has been deleted."""
        found = self._database.read("SELECT state FROM jobs WHERE name = ?", name)
        return State(found[0][0]) if found else None

    def of_host(self, host: str, states: Iterable[State]) -> list[Job]:
        """A machine's jobs in certain states, the oldest first."""
        wanted = [str(one) for one in states]
        query = (
            f"SELECT {', '.join(_COLUMNS)} FROM jobs WHERE state IN ({', '.join('?' * len(wanted))}) AND host = ? "
            "ORDER BY queued, name"
        )
        return [_job(row) for row in self._database.read(query, *wanted, host)]

    def waiting(self, host: str) -> list[Waiting]:
        """A machine's queue, in no order."""
        query = "SELECT name, cpus, gpus, memory_gb, queued, priority FROM jobs WHERE state = ? AND host = ?"
        rows = self._database.read(query, str(State.QUEUED), host)
        return [Waiting(row[0], Resources(*row[1:4]), *row[4:]) for row in rows]

    def last_end(self, host: str) -> float:
        """When a machine's last job ended, in seconds since the epoch; 0 if none has."""
        return self._database.read("SELECT COALESCE(MAX(ended), 0) FROM jobs WHERE host = ?", host)[0][0]

    def waiting_since(self, host: str, before: float) -> list[tuple[str, float, dict[str, Any]]]:
        """Of a machine's queue those that came into it before a moment: their names, when that was, and their plans."""
        query = "SELECT name, queued, plan FROM jobs WHERE state = ? AND host = ? AND queued < ?"
        rows = self._database.read(query, str(State.QUEUED), host, before)
        return [(row[0], row[1], json.loads(row[2])) for row in rows]

    def list(self, state: State | None = None, limit: int | None = None) -> list[Summary]:
        """Jobs, the newest first.

        Args:
            state: only those in it.
            limit: at most so many.
        """
        where, values = (" WHERE state = ?", [str(state)]) if state else ("", [])
        end = f" LIMIT {int(limit)}" if limit is not None else ""
        query = f"SELECT {_SUMMARY} FROM jobs{where} ORDER BY created DESC, name{end}"
        rows = self._database.read(query, *values)
        return [Summary(row[0], State(row[1]), *row[2:]) for row in rows]

    def count(self) -> int:
        """How many jobs there are."""
        return self._database.read("SELECT COUNT(*) FROM jobs")[0][0]

    def move(self, name: str, source: State, target: State, at: float, cause: str = "", **changes: Any) -> bool:
        """Bring a job from one state to another, unless it isn't in `source` any more.

        Args:
            name: the job's.
            source: the state that the caller takes it to be in.
            target: the state that it gets.
            at: when, in seconds since the epoch; the same in a second call for the same purpose.
            cause: why, in words.
            changes: further fields of `Job` that get new values.

        Returns:
            Whether it was in `source`.

        Raises:
            ValueError: `target` never follows `source`.
        """
        if not may_follow(source, target):
            raise ValueError(f"{name}: {target} never follows {source}.")
        new = {"state": target, "cause": cause, **changes}
        setting = ", ".join(f"{key} = ?" for key in new)
        values = [_to_json(value) if key in _JSON else _plain(value) for key, value in new.items()]

        def work(execute: Execute) -> bool:
            moved = execute(
                f"UPDATE jobs SET {setting} WHERE name = ? AND state = ? RETURNING attempt", *values, name, str(source)
            )
            if moved:
                _note(execute, name, Transition(source, target, at, moved[0][0], cause))
                return True
            again = "SELECT 1 FROM transitions WHERE job = ? AND source = ? AND target = ? AND at = ?"
            return bool(execute(again, name, str(source), str(target), at))

        return self._database.transaction(work)

    def explain(self, name: str, state: State, cause: str) -> None:
        """Say anew why a job is in a state, unless it isn't in it any more; that is no transition."""
        self._database.transaction(
            lambda execute: execute("UPDATE jobs SET cause = ? WHERE name = ? AND state = ?", cause, name, str(state))
        )

    def own(self, name: str, owner: dict[str, Any] | None) -> None:
        """Note who a job's supervisor is."""
        self._database.transaction(
            lambda execute: execute("UPDATE jobs SET owner = ? WHERE name = ?", _to_json(owner), name)
        )

    def delete(self, name: str) -> State | None:
        """Forget a job that has ended.

        Returns:
            The state of one that hasn't, which stays; else None.
        """

        def work(execute: Execute) -> State | None:
            # This update locks the row: on PostgreSQL, another transaction may change what a SELECT has read.
            found = execute("UPDATE jobs SET state = state WHERE name = ? RETURNING state", name)
            if not found:
                return None
            if State(found[0][0]) not in FINAL:
                return State(found[0][0])
            execute("DELETE FROM jobs WHERE name = ?", name)
            execute("DELETE FROM transitions WHERE job = ?", name)
            execute("DELETE FROM processes WHERE job = ?", name)
            return None

        return self._database.transaction(work)

    def transitions(self, name: str) -> list[Transition]:
        """What has happened to a job, in order."""
        query = "SELECT source, target, at, attempt, cause FROM transitions WHERE job = ? ORDER BY number"
        rows = self._database.read(query, name)
        return [Transition(row[0] and State(row[0]), State(row[1]), *row[2:]) for row in rows]

    def begin_processes(self, name: str, processes: Sequence[Process]) -> None:
        """Note the processes of an attempt."""

        def work(execute: Execute) -> None:
            for one in processes:
                execute("DELETE FROM processes WHERE job = ? AND attempt = ? AND role = ? AND position = ?",
                        name, one.attempt, one.role, one.index)  # fmt: skip
                execute("INSERT INTO processes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        name, one.attempt, one.role, one.index, one.pid, one.mark, one.began, one.ended,
                        one.outcome)  # fmt: skip

        self._database.transaction(work)

    def end_processes(self, name: str, ends: Sequence[Process]) -> None:
        """Note how processes have ended."""

        def work(execute: Execute) -> None:
            for one in ends:
                execute(
                    "UPDATE processes SET ended = ?, outcome = ? "
                    "WHERE job = ? AND attempt = ? AND role = ? AND position = ?",
                    one.ended, one.outcome, name, one.attempt, one.role, one.index,
                )  # fmt: skip

        self._database.transaction(work)

    def processes(self, name: str) -> list[Process]:
        """The processes of all attempts, in order."""
        query = (
            "SELECT attempt, role, position, pid, mark, began, ended, outcome FROM processes WHERE job = ? "
            "ORDER BY attempt, role, position"
        )
        return [Process(*row) for row in self._database.read(query, name)]


def insert(execute: Execute, job: Job) -> bool:
    """Put a job's row, and its first transition, inside a transaction; False if its name is taken."""
    values = [_plain(getattr(job, one)) for one in _PLAIN]
    values += [getattr(job.needs, one) for one in _NEEDS]
    values += [_to_json(getattr(job, one)) for one in _JSON]
    places = ", ".join("?" * len(_COLUMNS))
    inserted = execute(
        f"INSERT INTO jobs ({', '.join(_COLUMNS)}) VALUES ({places}) ON CONFLICT (name) DO NOTHING RETURNING name",
        *values,
    )
    if inserted:
        _note(execute, job.name, Transition(None, job.state, job.created, job.attempt, job.cause))
    return bool(inserted)


def _note(execute: Execute, name: str, one: Transition) -> None:
    number = execute("SELECT COUNT(*) FROM transitions WHERE job = ?", name)[0][0]
    execute(
        "INSERT INTO transitions VALUES (?, ?, ?, ?, ?, ?, ?)",
        name, number, _plain(one.source), str(one.target), one.at, one.attempt, one.cause,
    )  # fmt: skip


def _job(row: Sequence[Any]) -> Job:
    found = dict(zip(_COLUMNS, row, strict=True))
    found |= {key: json.loads(found[key]) if found[key] else None for key in _JSON}
    found["devices"] = tuple(found["devices"])
    found["state"] = State(found["state"])
    return Job(
        **{key: found[key] for key in found if key not in _NEEDS}, needs=Resources(*(found[one] for one in _NEEDS))
    )


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, State) else value


def _to_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, sort_keys=True)
