"""The trials of tunings in the store.

A trial and its job are added in one transaction, and a trial's result is written once. So whenever a process dies, a trial
has exactly one job, and a finished trial is neither lost nor repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from footplate.jobs.record import Fork, Job, Trial, TrialState
from footplate.jobs.store.database import Database, Execute

_COLUMNS = "tuning, number, job, state, parameters, measurements, value, step, created, ended, cause"


class Trials:
    """Trials in a database.

    Args:
        database: the database.
        insert: adds a job inside a transaction; returns False if its name is taken.
    """

    def __init__(self, database: Database, insert: Callable[[Execute, Job], bool]) -> None:
        self._database = database
        self._insert = insert

    def add(self, trial: Trial, job: Job) -> bool:
        """Add a trial together with its job. Returns False if another job has the name."""

        def work(execute: Execute) -> bool:
            # An earlier call of this function may have been committed.
            earlier = execute("SELECT created FROM trials WHERE tuning = ? AND number = ?", trial.tuning, trial.number)
            if earlier:
                return earlier[0][0] == trial.created
            if not self._insert(execute, job):
                return False
            execute(
                f"INSERT INTO trials ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                trial.tuning, trial.number, trial.job, str(trial.state), json.dumps(trial.parameters),
                json.dumps(trial.measurements), trial.value, trial.step, trial.created, trial.ended, trial.cause,
            )  # fmt: skip
            if (fork := trial.fork) is not None:
                execute(
                    "INSERT INTO forks (tuning, number, parent, step, replaces) VALUES (?, ?, ?, ?, ?)",
                    trial.tuning, trial.number, fork.parent, fork.step, fork.replaces,
                )  # fmt: skip
            return True

        return self._database.transaction(work)

    def of(self, tuning: str) -> list[Trial]:
        """The trials of a tuning, in the order of their numbers."""
        rows = self._database.read(f"SELECT {_COLUMNS} FROM trials WHERE tuning = ? ORDER BY number", tuning)
        origins = self._database.read("SELECT number, parent, step, replaces FROM forks WHERE tuning = ?", tuning)
        forks = {number: Fork(*origin) for number, *origin in origins}
        return [replace(trial, fork=forks.get(trial.number)) for trial in map(_trial, rows)]

    def change(self, trial: Trial, **changes: Any) -> Trial:
        """Change a trial that hasn't ended, and return it. A trial that has ended stays as it is.

        Args:
            trial: the trial, as it was read.
            changes: new values of fields of `Trial`.
        """
        changed = replace(trial, **changes)

        def work(execute: Execute) -> None:
            execute(
                "UPDATE trials SET state = ?, measurements = ?, value = ?, step = ?, ended = ?, cause = ? "
                "WHERE tuning = ? AND number = ? AND ended IS NULL",
                str(changed.state), json.dumps(changed.measurements), changed.value, changed.step, changed.ended,
                changed.cause, trial.tuning, trial.number,
            )  # fmt: skip

        self._database.transaction(work)
        return changed


def _trial(row: Any) -> Trial:
    tuning, number, job, state, parameters, measurements, value, step, created, ended, cause = row
    series = tuple((float(at), float(measured)) for at, measured in json.loads(measurements))
    return Trial(
        tuning, number, job, TrialState(state), json.loads(parameters), series, value, step, created, ended, cause
    )
