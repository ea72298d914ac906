"""Effects of reconciling and deleting on jobs in the store. No supervisor starts here."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from footplate.jobs.backends.local import machine
from footplate.jobs.home import Home
from footplate.jobs.operations import Jobs
from footplate.jobs.record import Job
from footplate.jobs.scheduling import Resources
from footplate.jobs.states import State
from footplate.jobs.store import open_store
from footplate.jobs.store.jobs import Store, WrongState
from footplate.jobs.supervision.follow import Follower
from footplate.jobs.supervision.identity import Identity
from footplate.jobs.supervision.locks import held
from footplate.jobs.supervision.reconcile import LIMITS, LOCK, reconcile
from jobs.conftest import is_held


class Watched(Store):
    """A store that records whether a lock was held when a job changed."""

    def __init__(self, home: Home, lock: Path) -> None:
        super().__init__(open_store(home)._database)
        self.lock = lock
        self.held: list[bool] = []

    def _look(self) -> None:
        self.held.append(is_held(self.lock))

    def move(self, *args: Any, **changes: Any) -> bool:
        self._look()
        return super().move(*args, **changes)

    def delete(self, name: str) -> State | None:
        self._look()
        return super().delete(name)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def store(home: Home) -> Iterator[Store]:
    store = open_store(home)
    yield store
    store.close()


def job(name: str, state: State = State.QUEUED, waited_s: float = 0.0, **changes: Any) -> Job:
    since = time.time() - waited_s
    given = {"host": machine.host(), "plan": {"spec": {}}, "needs": Resources(1), **changes}
    return Job(name, state, since, since, **given)


def test_a_job_that_has_waited_for_too_long_is_cancelled_and_no_other(home: Home, store: Store):
    alive = Identity.of(os.getpid())
    assert alive is not None
    store.add(job("runs", State.RUNNING, 7200.0, owner=alive.to_dict(), needs=Resources(10_000)))  # no room for another
    hour = {"spec": {"scheduling": {"maxWaitTime": "3600s"}}}
    store.add(job("late", waited_s=3660.0, plan=hour))
    store.add(job("early", waited_s=3000.0, plan=hour))
    store.add(job("patient", waited_s=3660.0))
    reconcile(home, store)
    assert store.find("late").cause == "it has waited for 3600s, its maximum waiting time"
    assert store.find("late").ended is not None
    assert {summary.name: summary.state for summary in store.list()} == {
        "runs": State.RUNNING,
        "late": State.CANCELLED,
        "early": State.QUEUED,
        "patient": State.QUEUED,
    }


def test_no_supervisor_begins_while_a_sweep_counts_the_loss_of_one(home: Home):
    store = Watched(home, home.job("lost") / LOCK)
    store.add(job("lost", State.RUNNING, losses=LIMITS.max_host_restarts))
    reconcile(home, store)
    assert store.find("lost").state == State.FAILED
    assert store.held == [True]


def test_a_job_whose_supervisor_holds_its_lock_is_not_lost_whoever_is_noted_as_such(home: Home, store: Store):
    store.add(job("runs", State.RUNNING))
    home.job("runs").mkdir(parents=True)
    with held(home.job("runs") / LOCK):
        reconcile(home, store)
    assert store.find("runs").losses == 0


def test_the_jobs_of_another_user_of_the_machine_and_the_store_are_left_to_them(tmp_path: Path, store: Store):
    store.add(job("waits"))
    store.add(job("lost", State.RUNNING))
    mine = Home(tmp_path / "mine", "postgresql://team@server/jobs")
    for name in ("waits", "lost"):  # of jobs of mine that had these names, and were deleted by others
        mine.attempt(name, 1).mkdir(parents=True)
    reconcile(mine, store)
    assert {summary.name: summary.state for summary in store.list()} == {"waits": State.QUEUED, "lost": State.RUNNING}
    assert store.find("lost").losses == 0


def test_no_job_of_the_same_name_is_submitted_while_one_is_deleted(home: Home):
    store = Watched(home, home.root / "jobs.lock")
    store.add(job("old", State.FAILED))
    (home.job("old") / "attempt-1").mkdir(parents=True)
    Jobs(home, store).delete("old")
    assert store.held == [True]
    assert not home.job("old").exists()
    assert not list((home.root / "trash").iterdir())


def test_output_that_is_deleted_while_it_is_followed_has_ended(home: Home):
    folder = home.attempt("my_job", 1)
    folder.mkdir(parents=True)
    (folder / "master-0.log").write_text("line\n")
    home.attempt("my_job", 2).symlink_to(home.root / "gone")  # there when it was looked for, and not when it is opened
    assert [line.text for line in Follower(home, "my_job").lines()] == ["line\n"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs that reconciling starts, without their supervisors."""
    names: list[str] = []
    monkeypatch.setattr("footplate.jobs.supervision.reconcile._spawn", lambda home, store, job: names.append(job.name))
    return names


@pytest.mark.parametrize(
    ("waited_s", "ended_s", "starts"), [(3600.0, 3600.0, True), (3600.0, 10.0, False), (10.0, 3600.0, False)]
)
def test_a_neighbours_job_that_nobody_starts_lets_ours_pass_after_a_minute(
    tmp_path: Path, store: Store, started: list[str], waited_s: float, ended_s: float, starts: bool
):
    home = Home(tmp_path, "postgresql://a.server/shared")  # names the store as shared; the test's own stands for it
    everything = machine.resources()
    store.add(job("ended", State.SUCCEEDED, 7200.0, ended=time.time() - ended_s))
    store.add(job("neighbours", waited_s=waited_s, needs=everything))
    ours = job("ours", waited_s=5.0, needs=everything)
    home.job("ours").mkdir(parents=True)
    (home.job("ours") / ours.id).touch()
    store.add(ours)
    reconcile(home, store)
    assert started == (["ours"] if starts else [])
    assert store.state("neighbours") == State.QUEUED


def test_a_job_whose_machine_is_lost_is_cancelled_without_it_and_can_be_deleted(home: Home, store: Store):
    jobs = Jobs(home, store)
    for state in (State.PREPARING, State.RUNNING, State.CANCELLING):
        store.add(job(state.lower(), state, host="gone"))
        assert jobs.cancel(state.lower()) == State.CANCELLING  # no supervisor ends it
        assert jobs.cancel(state.lower(), machine_lost=True) == State.CANCELLED
        assert jobs.wait(state.lower()).cause == "cancelled by the user, as its machine gone is lost"
        jobs.delete(state.lower())
    assert store.list() == []


def test_a_job_of_this_machine_is_not_one_of_a_lost_machine(home: Home, store: Store):
    store.add(job("here"))
    with pytest.raises(WrongState, match="Leave out --machine-lost"):
        Jobs(home, store).cancel("here", machine_lost=True)


def test_a_job_of_a_machine_that_was_renamed_is_resubmitted_to_it(tmp_path: Path, store: Store, started: list[str]):
    home = Home(tmp_path, "postgresql://a.server/shared")
    for name in ("ours", "theirs"):
        store.add(job(name, State.CANCELLED, host="old_name"))
    home.job("ours").mkdir(parents=True)
    (home.job("ours") / store.find("ours").id).touch()
    for name in ("ours", "theirs"):
        Jobs(home, store).resubmit(name)
    assert (store.find("ours").host, store.find("theirs").host) == (machine.host(), "old_name")
    assert set(started) == {"ours"}
