"""The ledger of real jobs: killed, preempted, failed, cancelled, queued, running, finished, with and without a record."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from footplate.core.goodput import Cause, Ledger, Stretch
from footplate.jobs.backends.local import machine
from footplate.jobs.goodput import job_ledger, stretches_of
from footplate.jobs.record import Job, Process, Transition
from footplate.jobs.states import State
from jobs.conftest import NET, Bench, a_bench, until

STEPS = 150
STEP_S = 0.02
# A report comes once a second, and a checkpoint after 100 steps. Each step is counted in a file of its attempt.
TRAINS = f"""
{NET}
from torch.utils.data import DataLoader, TensorDataset

class Counted(Net):
    def training_step(self, batch, batch_idx):
        time.sleep({STEP_S})
        return super().training_step(batch, batch_idx)
    def on_train_batch_end(self, *_):
        with open(place / f"steps-{{attempt}}", "a") as file:
            file.write(".")
        after_step(self.trainer.global_step)

def train():
    trainer = fp.Trainer(
        max_steps={STEPS}, max_epochs=-1, accelerator="cpu", log_every_n_steps=5, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[fp.ModelCheckpoint(every_n_train_steps=100)],
    )
    loader = DataLoader(TensorDataset(torch.arange(400.0).reshape(100, 4)), 4)
    trainer.fit(Counted(), loader, ckpt_path="last")

def after_step(step):
    pass
"""


def trains(bench: Bench, rest: str) -> None:
    """Write a program that trains."""
    bench.program(TRAINS + rest)


def ledger_of(bench: Bench, name: str = "my_job") -> Ledger:
    """The ledger of a job. Its causes sum to its time, in order and without a gap."""
    job = bench.jobs.store.find(name)
    result = job_ledger(bench.jobs.home, bench.jobs.store, job)
    assert math.isclose(math.fsum(result.seconds.values()), result.wall_s, rel_tol=1e-9)
    assert result.began == job.created
    assert job.ended is None or abs(result.ended - job.ended) < 0.1
    assert result.runs == (job.ended is None)
    return result


def counted(bench: Bench) -> int:
    """Steps of all attempts, as the program counted them."""
    return sum(len(file.read_text()) for file in bench.directory.glob("steps-*"))


def assert_lost(result: Ledger, again: int) -> None:
    """The lost steps are those that were made again. The steps between a report and a kill are estimated."""
    assert again > 60
    assert 0.5 * again <= result.lost_steps <= 1.5 * again
    assert result.seconds[Cause.LOST] >= 0.5 * STEP_S * result.lost_steps
    assert result.last_step == STEPS


def test_a_killed_training_names_what_was_trained_again(bench: Bench):
    trains(bench, """
def after_step(step):
    if (attempt, step) in ((1, 90), (2, 145)):
        os.kill(os.getpid(), signal.SIGKILL)
train()
""")  # fmt: skip
    before = time.time()
    bench.submit()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    wall_s = time.time() - before

    result = ledger_of(bench)
    assert 0 <= wall_s - result.wall_s < 5.0
    assert result.split
    assert [attempt.first_step for attempt in result.attempts] == [0, 0, 100]
    assert counted(bench) == 90 + 145 + 50
    assert_lost(result, 135)
    assert result.seconds[Cause.TRAINING] >= 0.5 * STEPS * STEP_S
    assert {Cause.STARTUP, Cause.DOWN, Cause.SHUTDOWN} <= result.seconds.keys()
    # The pause between the second and the third attempt is that of the restart policy.
    assert result.seconds[Cause.DOWN] >= 1.0
    assert result.seconds.get(Cause.UNKNOWN, 0.0) < 0.2 * result.wall_s
    assert result.goodput == result.seconds[Cause.TRAINING] / (result.wall_s - result.seconds[Cause.QUEUED])

    # The catalog has a price for the machine of the job, here that of the tier BASIC.
    assert result.usd == pytest.approx(0.189999 * (result.wall_s - result.seconds[Cause.QUEUED]) / 3600)
    assert result.machine == "if it ran on 1 n1-standard-4, by the list price in us-central1"
    assert result.usd_lost is not None
    assert 0 < result.usd_lost < result.usd


def test_a_preempted_training_lost_nothing_and_a_failed_one_is_restarted(bench: Bench):
    trains(bench, """
def after_step(step):
    if attempt == 1 and step >= 70:
        (place / "ready").touch()
        time.sleep(0.2)
    if (attempt, step) == (2, 110):
        (place / "at-110").touch()
        until_there("go")
        raise OSError("the network was away")
train()
""")  # fmt: skip
    bench.submit()
    bench.there("ready")
    os.kill(bench.supervisor(), signal.SIGTERM)
    until(lambda: bench.jobs.find("my_job").attempt == 2)
    bench.there("at-110")
    assert counted(bench) == 110
    preempted = until(lambda: (now := ledger_of(bench)).attempts[1:] and now.attempts[1].last_step and now)
    assert (preempted.lost_steps, Cause.LOST in preempted.seconds) == (0, False)
    assert [attempt.first_step for attempt in preempted.attempts] == [0, preempted.attempts[0].last_step]
    assert Cause.DOWN in preempted.seconds

    (bench.directory / "go").touch()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    result = ledger_of(bench)
    first, second, _ = (attempt.last_step for attempt in result.attempts)
    assert second is not None
    assert [attempt.first_step for attempt in result.attempts] == [0, first, second - result.lost_steps]
    assert result.lost_steps == counted(bench) - STEPS
    assert result.last_step == STEPS


def test_a_job_is_watched_while_it_waits_prepares_runs_and_is_cancelled(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    trains(bench, """
def after_step(step):
    if step == 60:
        (place / "ready").touch()
        until_there("go")
train()
""")  # fmt: skip
    monkeypatch.setenv("FOOTPLATE_CPUS", "1")  # as many as a job needs
    bench.submit("first")
    bench.submit("second")
    bench.is_in(State.RUNNING, "first")
    waits = ledger_of(bench, "second")
    assert (waits.seconds.keys(), waits.goodput, waits.usd) == ({Cause.QUEUED}, None, 0.0)

    bench.there("ready")
    runs = until(lambda: (now := ledger_of(bench, "first")).last_step and now)
    assert runs.attempts[0].last_step in range(5, STEPS)
    assert Cause.TRAINING in runs.seconds
    # The program hangs. After some seconds that is no longer taken for training.
    later = until(lambda: (now := ledger_of(bench, "first")).seconds.get(Cause.UNKNOWN, 0.0) > 1.0 and now)
    assert later.seconds[Cause.TRAINING] <= runs.seconds[Cause.TRAINING] + 10.0

    bench.jobs.cancel("first")
    (bench.directory / "go").touch()
    assert bench.jobs.wait("first").state == State.CANCELLED
    ended = ledger_of(bench, "first")
    assert (ended.runs, ended.lost_steps) == (False, 0)
    bench.jobs.wait("second")
    # The second job used the same directory. Its steps are not those of the first one.
    assert ledger_of(bench, "first").seconds == ended.seconds
    assert ledger_of(bench, "second").seconds[Cause.QUEUED] > 1.0


def test_a_lost_supervisor_leaves_the_end_to_the_last_file(bench: Bench):
    trains(bench, """
def after_step(step):
    if (attempt, step) == (1, 70):
        (place / "ready").touch()
train()
""")  # fmt: skip
    bench.submit()
    bench.there("ready")
    os.kill(bench.supervisor(), signal.SIGKILL)
    killed = time.time()
    time.sleep(3.0)
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    result = ledger_of(bench)
    again = counted(bench) - STEPS
    assert [attempt.first_step for attempt in result.attempts] in ([0, 0], [0, 100])
    # Its usage is measured once a second, and its training reported no more often.
    assert max(1, again - 1.5 / STEP_S) <= result.lost_steps <= again + 1.5 / STEP_S
    assert result.attempts[0].ended <= killed + 1.0
    assert result.seconds[Cause.DOWN] >= 2.0


def test_a_training_in_two_ranks_that_restarts_them_itself(bench: Bench):
    trains(bench, """
def after_step(step):
    if step == 70 and os.environ["RANK"] == "1" and not (place / "killed").exists():
        (place / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    from footplate.launch import launch
    launch(train, world_size=2, preload=("footplate.training.trainer", "torch._dynamo"))
""")  # fmt: skip
    bench.submit()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED, bench.output()
    result = ledger_of(bench)
    (attempt,) = result.attempts
    assert (attempt.first_step, attempt.last_step) == (0, STEPS)
    assert_lost(result, counted(bench) // 2 - STEPS)
    assert Cause.DOWN in result.seconds
    training = next(entry for entry in result.entries if entry.cause == Cause.TRAINING)
    assert training.device_seconds == pytest.approx(2 * training.seconds)


@pytest.fixture(scope="module")
def resubmitted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bench, Ledger]]:
    """A job that failed, and trained when it was submitted again. With the ledger of the failure."""
    with pytest.MonkeyPatch.context() as patch, a_bench(tmp_path_factory.mktemp("resubmitted"), patch) as bench:
        # It fails before its imports, which take seconds.
        bench.program(f"if attempt < 3:\n    raise ValueError('too large')\n{TRAINS}\ntrain()")
        bench.submit()
        assert bench.jobs.wait("my_job").state == State.FAILED
        failed = ledger_of(bench)
        time.sleep(1.0)
        bench.jobs.resubmit("my_job")
        assert bench.jobs.wait("my_job").state == State.SUCCEEDED
        yield bench, failed


def test_a_resubmitted_job_was_idle_meanwhile(resubmitted: tuple[Bench, Ledger]):
    bench, failed = resubmitted
    assert failed.goodput is None
    result = ledger_of(bench)
    assert result.seconds[Cause.IDLE] >= 1.0
    assert [attempt.first_step for attempt in result.attempts] == [None] * len(failed.attempts) + [0]
    assert result.usd == pytest.approx(
        0.189999 / 3600 * (result.wall_s - result.seconds[Cause.QUEUED] - result.seconds[Cause.IDLE])
    )


def test_damage_to_a_record_costs_what_it_held(resubmitted: tuple[Bench, Ledger]):
    bench, _ = resubmitted
    whole = ledger_of(bench)
    record = Path(bench.job_dir) / "monitor.jsonl"
    text = record.read_text()

    def rewrite(data: bytes) -> None:
        # Another file, since a reader reads on in the one that it knows.
        other = record.with_suffix(".other")
        other.write_bytes(data)
        other.rename(record)

    # A row in the middle.
    rows = text.splitlines()
    windows = [number for number, row in enumerate(rows) if json.loads(row)["kind"] == "window"]
    rows[windows[1]] = rows[windows[1]][:30]
    rewrite(("\n".join(rows) + "\n").encode())
    result = ledger_of(bench)
    assert f"1 row of {record} could not be read." in result.notes[0]
    assert result.last_step == STEPS
    assert result.seconds[Cause.UNKNOWN] > whole.seconds.get(Cause.UNKNOWN, 0.0)

    # All rows.
    rewrite(b"\x00\xff{" + text.encode().replace(b'"kind"', b'"mind"'))
    assert "could not be read" in notes_of_a_time_that_is_not_split(bench)

    # The record.
    record.unlink()
    assert "could not be read" not in notes_of_a_time_that_is_not_split(bench)
    rewrite(text.encode())


def notes_of_a_time_that_is_not_split(bench: Bench) -> str:
    """Assert that the time of a job that has trained is not split. Return the notes, which say why."""
    result = ledger_of(bench)
    assert (result.split, result.goodput, result.last_step) == (False, None, None)
    assert result.seconds[Cause.TRAINING] > STEPS * STEP_S
    notes = " ".join(result.notes)
    assert f"There is no monitor.jsonl of this job in {bench.job_dir}" in notes
    return notes


# Without processes


def a_job(**more: object) -> Job:
    return replace(Job("my_job", State.RUNNING, 0.0, 0.0, machine.host()), **more)  # type: ignore[arg-type]


def test_the_record_of_a_job_as_stretches():
    moves = [
        (State.QUEUED, 0, 0), (State.PREPARING, 10, 1), (State.RUNNING, 14, 1), (State.PREPARING, 31, 2),
        (State.RUNNING, 36, 2), (State.CANCELLING, 50, 2), (State.CANCELLED, 53, 2), (State.QUEUED, 90, 2),
        (State.PREPARING, 91, 3), (State.FAILED, 95, 3), (State.QUEUED, 96, 3),
    ]  # fmt: skip
    transitions = [Transition(None, state, float(at), attempt, "") for state, at, attempt in moves]
    processes = [
        Process(1, "master", 0, 7, 0.0, 13.0, 30.0, "killed"), Process(1, "worker", 0, 8, 0.0, 13.5, 29.0, "ended"),
        Process(2, "master", 0, 9, 0.0, 35.0, 52.0, "ended"),
    ]  # fmt: skip
    expected = [
        (0, 10, Cause.QUEUED, False), (10, 13, Cause.STARTUP, True), (13, 30, None, True), (30, 31, Cause.DOWN, True),
        (31, 35, Cause.DOWN, True), (35, 52, None, True), (52, 53, Cause.SHUTDOWN, True), (53, 90, Cause.IDLE, False),
        (90, 91, Cause.QUEUED, False), (91, 95, Cause.STARTUP, True), (95, 96, Cause.IDLE, False),
        (96, 99, Cause.QUEUED, False),
    ]  # fmt: skip

    def shape(stretches: list[Stretch]) -> list[tuple[float, float, Cause | None, bool]]:
        return [(each.began, each.ended, each.cause, each.paid) for each in stretches]

    computed = stretches_of(a_job(), transitions, processes, 99.0)
    assert shape(computed) == expected
    assert [each.runs for each in computed] == [False] * 11 + [True]

    # Elsewhere, only processes cost money.
    elsewhere = stretches_of(a_job(backend="vertex"), transitions, processes, 99.0)
    assert [each.paid for each in elsewhere] == [each.cause is None for each in elsewhere]


def test_processes_that_run_have_no_end_yet():
    transitions = [
        Transition(None, State.QUEUED, 0.0, 0, ""), Transition(State.QUEUED, State.PREPARING, 1.0, 1, ""),
        Transition(State.PREPARING, State.RUNNING, 3.0, 1, ""),
    ]  # fmt: skip
    processes = [Process(1, "master", 0, 7, 0.0, 2.0), Process(1, "worker", 0, 8, 0.0, 2.0, 5.0, "ended")]
    *_, last = stretches_of(a_job(), transitions, processes, 9.0)
    assert (last.began, last.ended, last.cause, last.runs) == (2.0, 9.0, None, True)


@pytest.mark.parametrize(
    ("host", "job_dir", "note"),
    [
        ("another", "/out", "The job runs on another, and its training is recorded there."),
        (None, None, "The job has no job directory, so its training can't be split. Set --job-dir."),
        (None, "gs://b/out", "The job directory is gs://b/out. The record of a training is read only on the machine"),
    ],
)
def test_a_note_says_why_the_training_is_not_split(bench: Bench, host: str | None, job_dir: str | None, note: str):
    plan = {"job_dir": job_dir, "directory": str(bench.directory), "replicas": []}
    job = a_job(host=host or machine.host(), plan=plan, backend="vertex", attempt=1)
    result = job_ledger(bench.jobs.home, bench.jobs.store, job, 5.0)
    assert result.notes[0].startswith(note)
