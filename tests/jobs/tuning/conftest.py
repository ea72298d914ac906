"""Tunings whose trials the test itself runs: the store and the files are real, and there are no processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from footplate.jobs import operations
from footplate.jobs.backends import get_backend
from footplate.jobs.record import Trial
from footplate.jobs.scheduling import Resources
from footplate.jobs.states import State
from footplate.jobs.store.sqlite import SQLite
from footplate.jobs.supervision import reconcile
from footplate.jobs.tuning.attempt import TuningAttempt
from jobs.conftest import Bench

# A grid of two parameters, in this order: (1, a), (1, b), (2, a), (2, b).
GRID = """
trainingInput:
  hyperparameters:
    goal: MAXIMIZE
    algorithm: GRID_SEARCH
    hyperparameterMetricTag: accuracy
    maxTrials: 10
    maxParallelTrials: 1
    params:
      - {parameterName: layers, type: INTEGER, minValue: 1, maxValue: 2}
      - {parameterName: kind, type: CATEGORICAL, categoricalValues: [a, b]}
"""


def grid(**keys: object) -> str:
    """The grid with other keys of its HyperparameterSpec."""
    lines = [line for line in GRID.splitlines() if line.strip().partition(":")[0] not in keys]
    at = lines.index("  hyperparameters:") + 1
    return "\n".join([*lines[:at], *(f"    {key}: {value}" for key, value in keys.items()), *lines[at:]])


def line_of(layers: int, **keys: object) -> str:
    """The same with one parameter, from 1 to `layers`."""
    head = grid(**keys).partition("    params:")[0]
    return f"{head}    params: [{{parameterName: layers, type: INTEGER, minValue: 1, maxValue: {layers}}}]\n"


class Killed(BaseException):
    """The supervisor ends here."""


@dataclass
class Kill:
    """Tells if the supervisor was killed."""

    happened: bool = False


@contextlib.contextmanager
def killed_at_write(monkeypatch: pytest.MonkeyPatch, number: int, after: bool) -> Iterator[Kill]:
    """End the code inside, which plays a supervisor, before or after its n-th transaction. The first one is 0."""
    transaction, calls, kill = SQLite.transaction, itertools.count(), Kill()

    def killed(self: SQLite, work: Any) -> Any:
        is_it = next(calls) == number
        if is_it and not after:
            raise Killed
        result = transaction(self, work)
        if is_it:
            raise Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(SQLite, "transaction", killed)
        try:
            yield kill
        except Killed:
            kill.happened = True


class Tuned:
    """A tuning, moved on by the test in place of its supervisor."""

    def __init__(self, bench: Bench, name: str = "tuned") -> None:
        self.bench = bench
        self.name = name
        self.store, self.home = bench.jobs.store, bench.jobs.home
        if self.store.state(name) == State.QUEUED:
            self.store.move(name, State.QUEUED, State.PREPARING, time.time(), attempt=1)
            self.store.move(name, State.PREPARING, State.RUNNING, time.time(), started=time.time())
        self.attempt = self.begin()

    def begin(self) -> TuningAttempt:
        """A new supervisor's view of the tuning."""
        folder = self.home.attempt(self.name, 1)
        folder.mkdir(parents=True, exist_ok=True)
        self.attempt = TuningAttempt(self.home, self.store, self.store.find(self.name), Resources(1), folder)
        return self.attempt

    def move_on(self) -> list[Trial]:
        """Move the tuning on once, and measure its trials. Returns them."""
        self.attempt._measure_at = 0.0
        self.attempt.wait(0.0)
        return self.trials

    @property
    def trials(self) -> list[Trial]:
        return self.store.trials.of(self.name)

    @property
    def states(self) -> list[str]:
        return [str(trial.state) for trial in self.trials]

    def run(self, number: int, attempt: int = 1) -> None:
        """Begin the job of a trial."""
        name = f"{self.name}_trial_{number}"
        if (state := self.store.state(name)) != State.PREPARING:
            assert state is not None
            self.store.move(name, state, State.PREPARING, time.time(), attempt=attempt)
        self.store.move(name, State.PREPARING, State.RUNNING, time.time(), started=time.time())

    def report(self, number: int, *measurements: tuple[float, float], attempt: int = 1, tag: str = "accuracy") -> None:
        """Write (step, value) pairs as `cloudml-hypertune` does."""
        folder = self.home.attempt(f"{self.name}_trial_{number}", attempt)
        folder.mkdir(exist_ok=True)
        lines = [json.dumps({tag: str(value), "global_step": str(step), "trial": "1"}) for step, value in measurements]
        (folder / "hypertune.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def end(self, number: int, state: State = State.SUCCEEDED, cause: str = "") -> None:
        """End the job of a trial."""
        name, now = f"{self.name}_trial_{number}", time.time()
        before = self.store.state(name)
        assert before is not None
        assert self.store.move(name, before, state, now, cause, ended=now)


@pytest.fixture
def still(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench on which nothing starts by itself."""
    monkeypatch.setattr(operations, "reconcile", lambda *_: None)
    monkeypatch.setattr(reconcile, "reconcile", lambda *_: None)
    bench.program("")
    return bench


def submit_with(bench: Bench, text: str, name: str = "tuned", **options: object) -> None:
    """Submit a tuning with options that a config can't express, as `footplate tune` does."""
    from footplate.jobs.spec.draft import draft
    from footplate.jobs.spec.resolving import resolve
    from footplate.jobs.spec.yamlfile import parse
    from footplate.jobs.submission import PlannedJob, submit

    flags = {"module-name": "trainer.task", "region": "us-central1", "job-dir": bench.job_dir}
    job = resolve(draft(parse(text), flags, (), name))
    place = get_backend(bench.backend).destination(bench.options)
    submit(PlannedJob(job, bench.directory / "trainer", bench.backend, place, tuning_options=options), bench.jobs)


def tuned(bench: Bench, text: str = GRID, name: str = "tuned") -> Tuned:
    """Submit a tuning."""
    bench.submit(name, (), text)
    return Tuned(bench, name)


def id_files(bench: Bench, name: str) -> list[str]:
    """The ids in the folder of a job."""
    return [path.name for path in Path(bench.jobs.home.job(name)).iterdir() if path.name.startswith(f"{name}-")]


def is_private(path: Path) -> bool:
    """Return True if only its user can read a file."""
    return path.stat().st_mode & 0o077 == 0
