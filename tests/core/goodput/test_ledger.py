"""The ledger as a pure function: simulated jobs whose true causes are known, and any times and rows at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.goodput import Cause, Ledger, Stretch, read_sessions
from footplate.core.goodput.ledger import ledger
from footplate.core.goodput.result import sums
from footplate.core.goodput.text import lines_of

CAUSES = {
    "input": Cause.INPUT,
    "forward": Cause.TRAINING,
    "logging": Cause.CALLBACKS,
    "checkpoint": Cause.CHECKPOINT,
    "validation": Cause.VALIDATION,
}


@dataclass
class Simulation:
    """A job with attempts. It notes what each second was, and which steps were made again.

    The clock of the machine that trains differs from the clock of the machine that supervises by `skew_s`.
    """

    skew_s: float = 0.0
    now: float = 1000.0
    stretches: list[Stretch] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    # Of each window: its steps, its seconds by cause, and True while no later attempt repeats it.
    trained: list[tuple[int, int, dict[Cause, float]]] = field(default_factory=list)
    other: list[dict[Cause, float]] = field(default_factory=list)
    step: int = 0
    farthest: int = 0
    repeated: int = 0
    lost: list[dict[Cause, float]] = field(default_factory=list)

    def wait(self, cause: Cause, seconds: float, attempt: int = 0) -> None:
        """Let time pass without processes."""
        paid = cause not in (Cause.QUEUED, Cause.IDLE)
        self.stretches.append(Stretch(self.now, self.now + seconds, cause, attempt, paid))
        self.other.append({cause: seconds})
        self.now += seconds

    def attempt(
        self, number: int, checkpoint: int, startup_s: float, windows: list[Any], end: str, end_s: float
    ) -> None:
        """Let an attempt train from a checkpoint. Without an `end`, it is killed just after a report."""
        began = self.now
        self._go_back(checkpoint)
        self.now += startup_s
        self.other.append({Cause.STARTUP: startup_s})
        self._row("start", step=self.step, world_size=2, setup_s=startup_s / 2)
        for steps, parts in windows:
            wall_s = math.fsum(parts.values())
            self.now += wall_s
            self.repeated += max(0, min(self.farthest, self.step + steps) - self.step)
            self.trained.append((self.step, self.step + steps, {CAUSES[name]: part for name, part in parts.items()}))
            self.step += steps
            self.farthest = max(self.farthest, self.step)
            self._row("window", step=self.step, batches=steps, wall_s=wall_s, seconds=parts)
        if end:
            self._row("end", step=self.step, status=end)
            self.now += end_s
            self.other.append({Cause.SHUTDOWN: end_s})
        self.stretches.append(Stretch(began, self.now, None, number))

    def _go_back(self, step: int) -> None:
        kept = []
        for first, last, seconds in self.trained:
            share = 1.0 if first >= step else max(0.0, (last - step) / (last - first)) if last > step else 0.0
            if share:
                self.lost.append({Cause.LOST: math.fsum(seconds.values()) * share})
            if share < 1:
                kept.append((first, min(last, step), {cause: part * (1 - share) for cause, part in seconds.items()}))
        self.trained, self.step = kept, step

    def _row(self, kind: str, **values: Any) -> None:
        self.rows.append({"kind": kind, "time": self.now + self.skew_s, **values})

    def truth(self) -> dict[Cause, float]:
        return sums([*self.other, *self.lost, *(seconds for *_, seconds in self.trained)])

    def ledger(self, **more: Any) -> Ledger:
        return ledger(self.stretches, [read_sessions(self.rows)], **more)


TOLD = ("interrupted", "failed")
lengths = st.floats(0.0, 500.0)
parts = st.dictionaries(st.sampled_from([*CAUSES]), st.floats(0.01, 30.0), min_size=1)
windows = st.lists(st.tuples(st.integers(1, 100), parts), min_size=1, max_size=6)


@st.composite
def simulations(draw: st.DrawFn, most_skew_s: float = 0.0, ends: tuple[str, ...] = ("", *TOLD)) -> Simulation:
    job = Simulation(draw(st.floats(-most_skew_s, most_skew_s)))
    job.wait(Cause.QUEUED, draw(lengths))
    job.wait(Cause.STARTUP, draw(lengths), 1)
    attempts = draw(st.integers(1, 5))
    for number in range(1, attempts + 1):
        checkpoint = draw(st.integers(0, job.step))
        end = draw(st.sampled_from(ends)) if number < attempts else "finished"
        job.attempt(number, checkpoint, draw(lengths), draw(windows), end, draw(lengths))
        if number < attempts:
            job.wait(Cause.DOWN, draw(lengths), number)
    job.wait(Cause.SHUTDOWN, draw(lengths), attempts)
    return job


def assert_sums(result: Ledger) -> None:
    """No second is missing, none counts twice, and none is negative."""
    assert math.isclose(math.fsum(entry.seconds for entry in result.entries), result.wall_s, rel_tol=1e-9, abs_tol=1e-6)
    assert all(entry.seconds > 0 for entry in result.entries)
    cursor = result.began
    for each in result.slices:
        assert (each.began, each.ended > each.began) == (cursor, True)
        assert math.isclose(math.fsum(each.seconds.values()), each.ended - each.began, rel_tol=1e-6, abs_tol=1e-6)
        assert all(seconds >= 0 for seconds in each.seconds.values())
        cursor = each.ended
    assert cursor == result.ended


@given(simulations())
def test_each_second_of_a_simulated_job_has_its_cause(job: Simulation):
    result = job.ledger()
    assert_sums(result)
    truth = job.truth()
    for cause in {*truth, *result.seconds}:
        assert result.seconds.get(cause, 0.0) == pytest.approx(truth.get(cause, 0.0), rel=1e-6, abs=1e-4), cause


@given(simulations())
def test_lost_steps_are_those_that_were_trained_again(job: Simulation):
    # The last attempt repeats all lost steps only if it trains as far as the earlier ones.
    missing = max(0, job.farthest - job.step)
    result = job.ledger()
    assert result.lost_steps == job.repeated + missing
    assert result.last_step == job.step


@given(simulations(1e6, TOLD))
def test_a_clock_that_differs_changes_no_sum(job: Simulation):
    for row in job.rows:
        if row["kind"] == "start":
            row["attempt"] = 1 + sum(1 for other in job.rows[: job.rows.index(row)] if other["kind"] == "start")
    result = job.ledger()
    assert_sums(result)
    # Each session finds its attempt by its number, and each window keeps its duration.
    truth = job.truth()
    for cause in (*CAUSES.values(), Cause.LOST):
        assert result.seconds.get(cause, 0.0) == pytest.approx(truth.get(cause, 0.0), rel=1e-6, abs=1e-3), cause


times = st.floats(-1e9, 4e9) | st.floats(0, 1000)
numbers = times | st.integers(-5, 500) | st.sampled_from([math.nan, math.inf, None, "1", True, 10**400])
rows = st.fixed_dictionaries(
    {"kind": st.sampled_from(["start", "window", "end", "epoch", "advice"]), "time": numbers, "step": numbers},
    optional={
        "wall_s": numbers, "setup_s": numbers, "process_s": numbers, "world_size": numbers, "batches": numbers,
        "attempt": numbers, "status": st.sampled_from(["finished", "interrupted", "failed", "lost", None]),
        "seconds": st.dictionaries(st.sampled_from([*CAUSES, "step", "new"]), numbers) | st.none(),
    },
)  # fmt: skip
stretches = st.lists(
    st.builds(
        Stretch, times, times, st.none() | st.sampled_from(Cause), st.integers(0, 3), st.booleans(), st.booleans()
    ),
    max_size=6,
)


@given(stretches, st.lists(st.lists(rows, max_size=12), max_size=3))
def test_any_times_and_rows_sum_to_the_wall_time(given_stretches, files):
    result = ledger(given_stretches, [read_sessions(file) for file in files], 4, 2.5)
    assert_sums(result)
    assert result.goodput is None or 0 <= result.goodput <= 1 + 1e-9
    assert result.usd is not None
    assert result.usd <= result.wall_s / 3600 * 2.5 * (1 + 1e-9)
    assert all(attempt.lost_steps >= 0 for attempt in result.attempts)
    lines_of(result)


def start(time: float, step: int = 0, **more: Any) -> dict[str, Any]:
    return {"kind": "start", "time": time, "step": step, "world_size": 1, "setup_s": 1.0, **more}


def window(time: float, step: int, wall_s: float = 1.0, **seconds: float) -> dict[str, Any]:
    parts = seconds or {"forward": wall_s}
    return {"kind": "window", "time": time, "step": step, "batches": 10, "wall_s": wall_s, "seconds": parts}


def of(stretches: list[Stretch], *rows: dict[str, Any], **more: Any) -> Ledger:
    result = ledger(stretches, [read_sessions(rows)], **more)
    assert_sums(result)
    return result


def test_a_process_that_was_killed_between_two_reports_trained_until_then():
    killed, again = Stretch(100, 112.5, attempt=1), Stretch(115, 122, attempt=2)
    rows = [start(110), window(111, 10), window(112, 20), start(120, step=10), window(121, 20), window(122, 30)]
    result = of([killed, Stretch(112.5, 115, Cause.DOWN, 1), again], *rows)
    # Half a second after the last report, five more steps.
    assert (result.attempts[0].last_step, result.lost_steps) == (25, 15)
    assert result.last_step == 30
    assert of([killed, Stretch(112.5, 120, attempt=2)], *rows[:-2]).last_step == 10
    assert result.seconds == {
        Cause.TRAINING: 3.0, Cause.LOST: 1.5, Cause.STARTUP: 15.0, Cause.DOWN: 2.5
    }  # fmt: skip


def test_a_checkpoint_after_the_last_report_saved_what_it_has():
    rows = [start(110), window(111, 10), window(112, 20), start(120, step=24), window(121, 34)]
    result = of([Stretch(100, 113, attempt=1), Stretch(113, 121, attempt=2)], *rows)
    assert (result.attempts[0].last_step, result.lost_steps) == (30, 6)
    assert result.seconds[Cause.LOST] == pytest.approx(0.6)


def test_a_training_that_was_killed_before_its_first_report_was_as_fast_as_before():
    rows = [start(110), window(111, 10), start(210, step=10), start(310, step=10), window(312, 20, 2.0)]
    attempts = [Stretch(100, 111, attempt=1), Stretch(200, 211.5, attempt=2), Stretch(300, 312, attempt=3)]
    result = of(attempts, *rows)
    assert (result.attempts[1].last_step, result.lost_steps) == (25, 15)
    assert result.attempts[1].seconds == {Cause.LOST: 1.5, Cause.STARTUP: 10.0}

    # The very first attempt has only later ones to be compared with. A long time without a report was no training.
    first = [Stretch(200, 270, attempt=2), Stretch(300, 312, attempt=3)]
    result = of(first, *rows[2:])
    assert (result.attempts[0].last_step, result.lost_steps) == (30, 20)
    assert result.attempts[0].seconds == {Cause.LOST: 4.0, Cause.STARTUP: 66.0}


def test_a_long_silence_before_the_end_is_unknown():
    result = of([Stretch(100, 172, attempt=1)], start(110), window(111, 10), window(112, 20))
    assert result.seconds == {Cause.TRAINING: 4.0, Cause.STARTUP: 10.0, Cause.UNKNOWN: 58.0}


def test_a_launcher_restarts_ranks_within_one_attempt():
    rows = [
        start(110), window(111, 10), window(112, 20), window(113, 30),
        start(120, step=10, process_s=3.0), window(121, 20), window(122, 30),
        {"kind": "end", "time": 122.5, "step": 30, "status": "finished"},
    ]  # fmt: skip
    result = of([Stretch(100, 123, attempt=1)], *rows)
    # The killed process ended at some time between two reports: the middle is assumed.
    assert result.seconds == pytest.approx({
        Cause.TRAINING: 3.0, Cause.LOST: 2.5, Cause.STARTUP: 13.0, Cause.DOWN: 3.5, Cause.SHUTDOWN: 1.0
    })  # fmt: skip
    assert (result.lost_steps, result.attempts[0].last_step, result.last_step) == (25, 35, 30)


def test_another_fit_after_a_finished_one_repeats_nothing():
    end = {"kind": "end", "time": 112, "step": 20, "status": "finished"}
    rows = [start(110), window(111, 10), window(112, 20), end, start(120), window(121, 10)]
    result = of([Stretch(100, 121, attempt=1)], *rows)
    assert result.lost_steps == 0
    assert result.seconds == {Cause.TRAINING: 3.0, Cause.STARTUP: 11.0, Cause.UNKNOWN: 7.0}


def test_both_fits_of_a_program_are_compared_with_their_own_repetition():
    end = {"kind": "end", "time": 112, "step": 20, "status": "finished"}
    first = [start(110), window(111, 10), window(112, 20), end, start(114), window(115, 10), window(116, 20)]
    second = [start(210, step=20), {**end, "time": 210}, start(214, step=10), window(215, 20)]
    result = of([Stretch(100, 116, attempt=1), Stretch(200, 215, attempt=2)], *first, *second)
    assert (result.lost_steps, result.seconds[Cause.LOST]) == (10, 1.0)


def test_an_attempt_that_never_began_to_train_only_started():
    rows = [start(110), window(111, 10), start(310, step=10), window(311, 20)]
    stretches = [Stretch(100, 111, attempt=1), Stretch(200, 250, attempt=2), Stretch(300, 311, attempt=3)]
    result = of(stretches, *rows)
    assert result.attempts[1].seconds == {Cause.STARTUP: 50.0}
    assert (result.attempts[1].first_step, result.attempts[1].last_step) == (None, None)


def test_trainings_at_the_same_time_share_their_seconds():
    stretches = [Stretch(100, 120, attempt=1)]
    files = [[start(101), window(110, 10, 9.0)], [start(101), window(119, 10, 18.0)]]
    result = ledger(stretches, [read_sessions(rows) for rows in files])
    assert_sums(result)
    assert result.seconds[Cause.TRAINING] == pytest.approx(18 + 1)


def test_without_a_record_the_time_of_processes_is_not_split():
    result = of([Stretch(0, 5, Cause.QUEUED, paid=False), Stretch(5, 15, attempt=1)], usd_per_hour=3600.0)
    assert (result.split, result.goodput, result.seconds[Cause.TRAINING]) == (False, None, 10.0)
    assert result.usd == 10.0
    assert lines_of(result)[0] == "goodput: unknown, since the time of the processes isn't split (10.0 s)"


def test_money_and_devices_follow_from_the_time_that_is_held():
    stretches = [Stretch(90, 100, Cause.QUEUED, paid=False), Stretch(100, 112, attempt=1)]
    result = of(stretches, start(110, world_size=4), window(112, 20, 2.0), usd_per_hour=36.0, machine="x")
    assert {entry.cause: entry.usd for entry in result.entries} == {
        Cause.TRAINING: 0.02, Cause.STARTUP: pytest.approx(0.1), Cause.QUEUED: 0.0
    }  # fmt: skip
    assert {entry.cause: entry.device_seconds for entry in result.entries} == {
        Cause.TRAINING: 8.0, Cause.STARTUP: 40.0, Cause.QUEUED: 0.0
    }  # fmt: skip
    assert result.goodput == pytest.approx(2 / 12)


def test_goodput_of_the_latest_time():
    result = of(
        [Stretch(100, 120, attempt=1)], start(110), window(115, 10, 5.0), window(120, 20, 5.0, input=2.5, forward=2.5)
    )
    assert result.between(105, 112.5) == {Cause.TRAINING: 2.5, Cause.STARTUP: 5.0}
    assert result.goodput_of_last(10) == pytest.approx(0.75)
    assert result.goodput_of_last(1e9) == result.goodput


def test_a_job_that_waits_has_no_goodput():
    result = of([Stretch(100, 130, Cause.QUEUED, paid=False, runs=True)])
    assert (result.goodput, result.runs, result.seconds) == (None, True, {Cause.QUEUED: 30.0})
    assert of([]).seconds == {}
