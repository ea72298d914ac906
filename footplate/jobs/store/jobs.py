"""The store: jobs, their transitions, and their processes. `Store.trials` has the trials of tunings."""

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
from footplate.jobs.store.trials import Trials

_JSON = ("devices", "plan", "spec", "labels", "owner")
_NEEDS = tuple(field.name for field in fields(Resources))
_PLAIN = tuple(field.name for field in fields(Job) if field.name not in (*_JSON, "needs"))
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
    """The job's state doesn't allow the operation, or its name is taken."""


class Store:
    """Jobs in a database.

    Attributes:
        trials: the trials of the jobs that tune.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.trials = Trials(database, insert)

    def close(self) -> None:
        """Close the connection."""
        self._database.close()

    def add(self, job: Job) -> None:
        """Add a new job in its first state.

        Raises:
            WrongState: a job of this name exists.
        """

        def work(execute: Execute) -> float | None:
            if insert(execute, job):
                return job.created
            # If an earlier call of this function was committed, the job in the table is this one.
            rows = execute("SELECT created FROM jobs WHERE name = ?", job.name)
            return rows[0][0] if rows else None

        if self._database.transaction(work) != job.created:
            raise WrongState(
                f"there is a job {job.name} already. Choose another name, or delete it: footplate jobs delete {job.name}"
            )

    def find(self, name: str) -> Job:
        """Return a job.

        Raises:
            UnknownJob: there is no job of this name.
        """
        job = self.get(name)
        if job is None:
            from footplate.catalog.lookup import nearest

            known = [summary.name for summary in self.list()]
            raise UnknownJob(f'there is no job "{name}".{nearest(name, known)} See: footplate jobs list')
        return job

    def get(self, name: str) -> Job | None:
        """Return a job; None if there is no job of this name."""
        # No job has such a name, and databases don't accept it.
        if not name.isascii() or "\0" in name:
            return None
        rows = self._database.read(f"SELECT {', '.join(_COLUMNS)} FROM jobs WHERE name = ?", name)
        return _job(rows[0]) if rows else None

    def state(self, name: str) -> State | None:
        """The state of a job; None if it was deleted."""
        rows = self._database.read("SELECT state FROM jobs WHERE name = ?", name)
        return State(rows[0][0]) if rows else None

    def of_host(self, host: str, states: Iterable[State]) -> list[Job]:
        """The jobs of a machine in certain states, the oldest first."""
        wanted = [str(state) for state in states]
        query = (
            f"SELECT {', '.join(_COLUMNS)} FROM jobs WHERE state IN ({', '.join('?' * len(wanted))}) AND host = ? "
            "ORDER BY queued, name"
        )
        return [_job(row) for row in self._database.read(query, *wanted, host)]

    def waiting(self, host: str) -> list[Waiting]:
        """The queue of a machine, in no order."""
        query = "SELECT name, cpus, gpus, memory_gb, queued, priority FROM jobs WHERE state = ? AND host = ?"
        rows = self._database.read(query, str(State.QUEUED), host)
        return [Waiting(row[0], Resources(*row[1:4]), *row[4:]) for row in rows]

    def last_end(self, host: str) -> float:
        """The time at which a machine's last job ended, in seconds since the epoch; 0 if none has."""
        return self._database.read("SELECT COALESCE(MAX(ended), 0) FROM jobs WHERE host = ?", host)[0][0]

    def waiting_since(self, host: str, before: float) -> list[tuple[str, float, dict[str, Any]]]:
        """The queued jobs of a machine that entered the queue before a time: name, that time, and plan."""
        query = "SELECT name, queued, plan FROM jobs WHERE state = ? AND host = ? AND queued < ?"
        rows = self._database.read(query, str(State.QUEUED), host, before)
        return [(row[0], row[1], json.loads(row[2])) for row in rows]

    def list(self, state: State | None = None, limit: int | None = None) -> list[Summary]:
        """List jobs, the newest first.

        Args:
            state: only jobs in this state.
            limit: the largest number of jobs.
        """
        where, values = (" WHERE state = ?", [str(state)]) if state else ("", [])
        end = f" LIMIT {int(limit)}" if limit is not None else ""
        query = f"SELECT {_SUMMARY} FROM jobs{where} ORDER BY created DESC, name{end}"
        rows = self._database.read(query, *values)
        return [Summary(row[0], State(row[1]), *row[2:]) for row in rows]

    def count(self) -> int:
        """The number of jobs."""
        return self._database.read("SELECT COUNT(*) FROM jobs")[0][0]

    def move(self, name: str, source: State, target: State, at: float, cause: str = "", **changes: Any) -> bool:
        """Move a job from one state to another, unless it has left `source`.

        Args:
            name: the job's name.
            source: the state in which the caller expects the job.
            target: the new state.
            at: the time, in seconds since the epoch. A repeated call for the same move passes the same time.
            cause: the reason, in words.
            changes: new values of other fields of `Job`.

        Returns:
            True if the job was in `source`.

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
                _add_transition(execute, name, Transition(source, target, at, moved[0][0], cause))
                return True

            # An earlier call of this function may have been committed.
            again = "SELECT 1 FROM transitions WHERE job = ? AND source = ? AND target = ? AND at = ?"
            return bool(execute(again, name, str(source), str(target), at))

        return self._database.transaction(work)

    def explain(self, name: str, state: State, cause: str) -> None:
        """Change the cause of a job's state, unless the job has left that state. That is no transition."""
        self._database.transaction(
            lambda execute: execute("UPDATE jobs SET cause = ? WHERE name = ? AND state = ?", cause, name, str(state))
        )

    def own(self, name: str, owner: dict[str, Any] | None) -> None:
        """Record the supervisor of a job."""
        self._database.transaction(
            lambda execute: execute("UPDATE jobs SET owner = ? WHERE name = ?", _to_json(owner), name)
        )

    def delete(self, name: str) -> State | None:
        """Delete a job that has ended.

        Returns:
            The state of a job that hasn't ended, and stays; otherwise None.
        """

        def work(execute: Execute) -> State | None:
            # The UPDATE locks the row: on PostgreSQL, another transaction may change what a SELECT has read.
            rows = execute("UPDATE jobs SET state = state WHERE name = ? RETURNING state", name)
            if not rows:
                return None
            if State(rows[0][0]) not in FINAL:
                return State(rows[0][0])
            execute("DELETE FROM jobs WHERE name = ?", name)
            execute("DELETE FROM transitions WHERE job = ?", name)
            execute("DELETE FROM processes WHERE job = ?", name)
            execute("DELETE FROM trials WHERE tuning = ?", name)
            execute("DELETE FROM forks WHERE tuning = ?", name)
            return None

        return self._database.transaction(work)

    def transitions(self, name: str) -> list[Transition]:
        """The transitions of a job, in order."""
        query = "SELECT source, target, at, attempt, cause FROM transitions WHERE job = ? ORDER BY number"
        rows = self._database.read(query, name)
        return [Transition(row[0] and State(row[0]), State(row[1]), *row[2:]) for row in rows]

    def begin_processes(self, name: str, processes: Sequence[Process]) -> None:
        """Record the processes of an attempt."""

        def work(execute: Execute) -> None:
            for process in processes:
                execute("DELETE FROM processes WHERE job = ? AND attempt = ? AND role = ? AND position = ?",
                        name, process.attempt, process.role, process.index)  # fmt: skip
                execute("INSERT INTO processes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        name, process.attempt, process.role, process.index, process.pid, process.mark, process.began,
                        process.ended, process.outcome)  # fmt: skip

        self._database.transaction(work)

    def end_processes(self, name: str, ends: Sequence[Process]) -> None:
        """Record the ends of processes."""

        def work(execute: Execute) -> None:
            for process in ends:
                execute(
                    "UPDATE processes SET ended = ?, outcome = ? "
                    "WHERE job = ? AND attempt = ? AND role = ? AND position = ?",
                    process.ended, process.outcome, name, process.attempt, process.role, process.index,
                )  # fmt: skip

        self._database.transaction(work)

    def processes(self, name: str) -> list[Process]:
        """The processes of all attempts of a job, in order."""
        query = (
            "SELECT attempt, role, position, pid, mark, began, ended, outcome FROM processes WHERE job = ? "
            "ORDER BY attempt, role, position"
        )
        return [Process(*row) for row in self._database.read(query, name)]


def insert(execute: Execute, job: Job) -> bool:
    """Insert a job's row, and its first transition, inside a transaction. Returns False if the name is taken."""
    values = [_plain(getattr(job, column)) for column in _PLAIN]
    values += [getattr(job.needs, column) for column in _NEEDS]
    values += [_to_json(getattr(job, column)) for column in _JSON]
    places = ", ".join("?" * len(_COLUMNS))
    inserted = execute(
        f"INSERT INTO jobs ({', '.join(_COLUMNS)}) VALUES ({places}) ON CONFLICT (name) DO NOTHING RETURNING name",
        *values,
    )
    if inserted:
        _add_transition(execute, job.name, Transition(None, job.state, job.created, job.attempt, job.cause))
    return bool(inserted)


def _add_transition(execute: Execute, name: str, transition: Transition) -> None:
    number = execute("SELECT COUNT(*) FROM transitions WHERE job = ?", name)[0][0]
    execute(
        "INSERT INTO transitions VALUES (?, ?, ?, ?, ?, ?, ?)",
        name, number, _plain(transition.source), str(transition.target), transition.at, transition.attempt,
        transition.cause,
    )  # fmt: skip


def _job(row: Sequence[Any]) -> Job:
    values = dict(zip(_COLUMNS, row, strict=True))
    values |= {key: json.loads(values[key]) if values[key] else None for key in _JSON}
    values["devices"] = tuple(values["devices"])
    values["state"] = State(values["state"])
    needs = Resources(*(values.pop(column) for column in _NEEDS))
    return Job(**values, needs=needs)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, State) else value


def _to_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, sort_keys=True)
