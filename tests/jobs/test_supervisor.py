"""A supervisor whose store is unavailable, or slow, or reports a cancellation: in the test's own process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from footplate.core.errors import Unavailable
from footplate.jobs import operations
from footplate.jobs.backends.vertex.attempt_record import AttemptRecord
from footplate.jobs.record import Process
from footplate.jobs.states import State
from footplate.jobs.store import open_store
from footplate.jobs.store.jobs import Store
from footplate.jobs.supervision import supervisor
from footplate.jobs.supervision.identity import Identity
from footplate.jobs.supervision.locks import held
from footplate.jobs.supervision.reconcile import PATIENCE_S
from footplate.jobs.supervision.supervisor import Supervisor
from footplate.launch.failure import Failure
from jobs.conftest import Bench, until


class Watched(Store):
    """A store that counts reads, records writes, and refuses writes while a file is missing."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(open_store(bench.jobs.home)._database)
        self.asked = 0
        self.written: list[str] = []
        self.refused: list[str] = []
        self.away_until: Path | None = None

    def state(self, name: str) -> State | None:
        self.asked += 1
        return super().state(name)

    def begin_processes(self, name: str, processes: Sequence[Process]) -> None:
        self._write("processes")
        super().begin_processes(name, processes)

    def end_processes(self, name: str, ends: Sequence[Process]) -> None:
        self._write("ends")
        super().end_processes(name, ends)

    def move(self, *args: Any, **changes: Any) -> bool:
        self._write(args[2])
        return super().move(*args, **changes)

    def _write(self, what: str) -> None:
        if self.away_until is not None and not self.away_until.exists():
            self.refused.append(what)
            raise Unavailable("the disk is full")
        self.written.append(what)


@pytest.fixture
def store(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(supervisor, "STORE_S", 0.1)
    monkeypatch.setattr(operations, "reconcile", lambda *_: None)  # the test begins what is submitted
    told = signal.getsignal(signal.SIGTERM)
    made = Watched(bench)
    yield made
    made.close()
    signal.signal(signal.SIGTERM, told)


def supervised(bench: Bench, store: Watched, source: str = "") -> Supervisor:
    """The supervisor of `my_job`, in this process."""
    bench.program(source)
    bench.submit()
    assert store.move("my_job", State.QUEUED, State.PREPARING, time.time(), attempt=1)
    # Without an owner, its own next reconcile pass would take the job for one whose supervisor is lost.
    owner = Identity.of(os.getpid())
    assert owner is not None
    store.own("my_job", owner.to_dict())
    store.written.clear()
    return Supervisor(bench.jobs.home, store, store.find("my_job"))


def test_a_program_goes_on_while_it_cannot_be_written_down_that_it_runs(bench: Bench, store: Watched):
    supervisor = supervised(bench, store, "print('x' * 1_000_000, flush=True); (place / 'written').touch()")
    store.away_until = bench.directory / "written"
    assert supervisor.run()
    assert bench.states() == ["QUEUED", "PREPARING", "RUNNING", "SUCCEEDED"]
    assert [process.outcome for process in store.processes("my_job")] == ["ended with exit code 0"]


def test_an_end_that_comes_while_the_store_is_away_is_written_when_that_is_back(bench: Bench, store: Watched):
    supervisor = supervised(bench, store)
    store.away_until = bench.directory / "back"
    back = threading.Timer(2.0, store.away_until.touch)
    back.start()
    assert supervisor.run()
    back.join()
    assert store.written == ["processes", "RUNNING", "ends", "SUCCEEDED"]
    assert [process.outcome for process in store.processes("my_job")] == ["ended with exit code 0"]


def test_a_process_that_ends_while_the_store_is_away_is_known_to_have_ended(bench: Bench, store: Watched):
    made, back = supervised(bench, store, "until_there('go')"), bench.directory / "back"

    def fill_the_disk() -> None:
        until(lambda: "RUNNING" in store.written)
        store.away_until = back
        (bench.directory / "go").touch()
        until(lambda: store.refused)
        back.touch()

    disk = threading.Thread(target=fill_the_disk)
    disk.start()
    assert made.run()
    disk.join()
    assert store.refused[0] == "ends"
    assert [process.outcome for process in store.processes("my_job")] == ["ended with exit code 0"]


def test_the_pause_before_an_attempt_is_shown(bench: Bench, store: Watched):
    assert supervised(bench, store, "os._exit(3 if attempt < 3 else 0)").run()
    causes = [transition.cause for transition in store.transitions("my_job") if transition.target == State.PREPARING]
    assert [cause.partition("of 3")[2] for cause in causes] == ["", "", "; attempt 3 begins in 1 s"]


def test_processes_are_known_before_the_job_is_running(bench: Bench, store: Watched):
    assert supervised(bench, store).run()  # else nobody would end what they leave if the supervisor died in between
    assert store.written == ["processes", "RUNNING", "ends", "SUCCEEDED"]


def test_the_store_is_asked_a_few_times_a_second_however_much_a_program_writes(bench: Bench, store: Watched):
    made = supervised(bench, store, "for number in range(2000): print(number, flush=True); time.sleep(0.0005)")
    began = time.monotonic()
    assert made.run()
    assert store.asked <= 2 + (time.monotonic() - began) / supervisor.TICK_S


def test_a_reconcile_pass_that_takes_long_does_not_keep_a_supervisor_from_its_job(bench: Bench, store: Watched):
    supervisor = supervised(bench, store, "time.sleep(1.0)")
    supervisor._reconciled = float("-inf")
    with held(bench.jobs.home.root / "sweep.lock"):
        began = time.monotonic()
        assert supervisor.run()
        assert time.monotonic() - began < PATIENCE_S / 2


@dataclass
class Elsewhere:
    """An attempt at a service: it waits until it is told to end, and then ends in its own way."""

    succeeds: bool
    running: bool = False
    over: bool = False
    succeeded: bool = False
    waits_for: str = "its turn"
    failure: Failure | None = None
    processes: list[Process] = field(default_factory=list)

    def wait(self, timeout_s: float) -> list[Process]:
        return []

    def stop(self, grace_s: float) -> None:
        self.over, self.succeeded = True, self.succeeds

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("succeeds", "written"), [(True, ["processes", "RUNNING", "SUCCEEDED"]), (False, ["FAILED"])])
def test_an_attempt_that_is_told_to_end_before_it_was_seen_to_run(
    bench: Bench, store: Watched, succeeds: bool, written: list[str]
):
    supervised(bench, store)
    store.move("my_job", State.PREPARING, State.PREPARING, time.time(), attempt=2, started=1.0)  # its time is over
    supervisor = Supervisor(bench.jobs.home, store, store.find("my_job"))
    supervisor._backend = SimpleNamespace(outlives=True, find=lambda _: Elsewhere(succeeds))
    store.written.clear()
    assert supervisor.run()
    assert store.written == written


def test_a_job_whose_attempt_is_lost_while_it_waits_has_not_begun_and_is_not_to_wait_any_longer_for_that(
    bench: Bench, store: Watched
):
    bench.program("")
    bench.submit(max_wait_time="1800s", max_running_time="1s")
    store.move("my_job", State.QUEUED, State.PREPARING, time.time(), attempt=1)
    supervisor = Supervisor(bench.jobs.home, store, store.find("my_job"))
    lost = Elsewhere(False, over=True, failure=Failure("host", "its entry point was lost", time.monotonic()))
    attempts = [lost, Elsewhere(False)]

    def find(task: Any) -> Elsewhere:
        if len(attempts) == 1:
            supervisor._job = replace(
                supervisor._job, queued=time.time() - 3600
            )  # as if it had waited for an hour by then
        return attempts.pop(0)

    supervisor._backend = SimpleNamespace(outlives=True, find=find)
    assert supervisor.run()
    job = store.find("my_job")
    assert (job.state, job.cause) == (State.CANCELLED, "it has waited for 1800s, its maximum waiting time")
    assert (job.started, job.losses) == (None, 1)
    assert State.RUNNING not in bench.states()


def test_a_job_that_is_being_cancelled_is_cancelled_though_its_attempt_cannot_be_found(bench: Bench, store: Watched):
    bench.backend, bench.options = "vertex", {"project": "my-project", "staging-bucket": "gs://my-bucket"}
    bench.job_dir = "gs://my-bucket/job"
    supervised(bench, store)
    assert store.move("my_job", State.PREPARING, State.CANCELLING, time.time())
    (bench.jobs.home.job("my_job") / "environment.json").unlink()
    folder = bench.jobs.home.attempt("my_job", 1)
    folder.mkdir()
    AttemptRecord(asked=time.time()).write(folder)
    assert Supervisor(bench.jobs.home, store, store.find("my_job")).run()
    job = store.find("my_job")
    assert job.state == State.CANCELLED
    assert "environment.json can't be read" in job.cause
