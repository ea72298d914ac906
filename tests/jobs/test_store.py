"""The store: one suite for SQLite and for a real PostgreSQL server."""

from __future__ import annotations

import os
import pwd
import shutil
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ports import free_port

from footplate.core.errors import ConfigError
from footplate.jobs.home import Home
from footplate.jobs.record import Fork, Job, Process, Trial, TrialState
from footplate.jobs.scheduling import Resources
from footplate.jobs.states import SUPERVISED, State, may_follow
from footplate.jobs.store import open_store
from footplate.jobs.store.jobs import Store, UnknownJob, WrongState

HERE = "this_machine"


class Server:
    """A PostgreSQL server in a directory of its own. As root it runs as `nobody`, because it refuses root."""

    def __init__(self, directory: Path) -> None:
        folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        self._programs = folders[-1] if folders else Path(shutil.which("initdb") or "/nowhere").resolve().parent
        self._data = directory / "data"
        self._user = pwd.getpwnam("nobody") if os.getuid() == 0 else None
        if self._user:
            os.chown(directory, self._user.pw_uid, self._user.pw_gid)
        self.port = free_port()
        self._run("initdb", "-D", self._data, "-U", "jobs", "--auth=trust", "--no-sync")
        self.start()

    def start(self) -> None:
        options = f"-h 127.0.0.1 -p {self.port} -k '' -F"
        self._run("pg_ctl", "-D", self._data, "-o", options, "-l", self._data / "log", "-w", "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "stop")

    def _run(self, program: str, *arguments: object) -> None:
        command = [str(self._programs / program), *map(str, arguments)]
        user = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []} if self._user else {}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/", **user)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as directory:  # pytest's directory is closed to other users
        server = Server(Path(directory))
        yield server
        server.stop()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.engine)])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """A function that opens a new connection to one store at each call."""
    if request.param == "sqlite":
        return lambda: open_store(Home(tmp_path))
    return request.getfixturevalue("postgres")


@pytest.fixture
def postgres(server: Server, tmp_path: Path) -> Callable[[], Store]:
    """A function that opens connections to one database of the server."""
    import psycopg

    port = server.port
    name = f"test_{time.monotonic_ns()}"
    with psycopg.connect(f"postgresql://jobs@127.0.0.1:{port}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return lambda: open_store(Home(tmp_path, f"postgresql://jobs@127.0.0.1:{port}/{name}"))


@pytest.fixture
def store(opened: Callable[[], Store]) -> Iterator[Store]:
    store = opened()
    yield store
    store.close()


def job(name: str = "one", **changes: object) -> Job:
    job = Job(
        name, State.QUEUED, 1000.5, 1000.5, HERE, priority=3, needs=Resources(1.5, 2, 7.5), devices=(0, 3),
        plan={"package": "abc"}, spec={"jobId": name, "args": ["ä", "'; DROP TABLE jobs; --"]}, labels={"team": "vision"},
    )  # fmt: skip
    return replace(job, **changes)


def test_what_is_put_in_comes_out(store: Store):
    store.add(job(owner={"pid": 7, "began": 1.5, "boot": "x"}))
    assert store.find("one") == job(owner={"pid": 7, "began": 1.5, "boot": "x"})
    assert store.find("one").id == "one-1000500000"


def test_a_name_is_taken_once(store: Store):
    store.add(job())
    with pytest.raises(ConfigError, match="there is a job one already"):
        store.add(job(created=2000.0))
    assert store.find("one").created == 1000.5


def trial(number: int = 1, **changes: object) -> Trial:
    parameters = {"lr": 1e-3, "layers": 3, "kind": "ä"}
    return replace(Trial("one", number, f"one_trial_{number}", TrialState.ACTIVE, parameters, created=7.5), **changes)


def test_a_trial_and_its_job_are_added_together_or_not_at_all(store: Store):
    store.add(job())
    assert store.trials.add(trial(), job("one_trial_1"))
    assert store.trials.of("one") == [trial()]
    # Another job has the name of the second one.
    store.add(job("one_trial_2"))
    assert not store.trials.add(trial(2), job("one_trial_2"))
    assert store.trials.of("one") == [trial()]
    # Two supervisors can't add the same trial.
    assert not store.trials.add(trial(created=8.5), job("one_trial_1b"))
    assert store.state("one_trial_1b") is None


def test_the_result_of_a_trial_is_written_once(store: Store):
    store.trials.add(trial(), job("one_trial_1"))
    measurements = ((1.0, 0.5), (2.0, float("inf")), (3.0, 0.7))
    ended = store.trials.change(
        trial(), state=TrialState.SUCCEEDED, measurements=measurements, value=0.7, step=3.0, ended=9.5
    )
    assert store.trials.of("one") == [ended]
    store.trials.change(trial(), state=TrialState.FAILED, ended=10.5)
    assert store.trials.of("one") == [ended]


def test_trials_are_deleted_with_their_tuning(store: Store):
    store.add(job(state=State.FAILED))
    store.trials.add(trial(), job("one_trial_1"))
    fork = trial(2, fork=Fork(1, 12.0, 1))
    store.trials.add(fork, job("one_trial_2"))
    assert store.trials.of("one") == [trial(), fork]
    assert store.delete("one") is None
    assert store.trials.of("one") == []
    # A later tuning of the name has none of it.
    store.trials.add(trial(2), job("one_trial_2b"))
    assert store.trials.of("one") == [trial(2)]


def test_a_store_of_before_tuning_gets_its_table_when_it_is_opened(opened: Callable[[], Store]):
    before = opened()
    before.add(job())
    before._database.transaction(lambda execute: execute("DROP TABLE trials"))
    before.close()
    after = opened()
    assert after.find("one") == job()
    assert after.trials.add(trial(), job("one_trial_1"))
    after.close()


def test_an_unknown_name_is_answered_with_the_nearest(store: Store):
    store.add(job("flowers_1"))
    with pytest.raises(UnknownJob, match=r'no job "flower_1"\. Did you mean "flowers_1"\?'):
        store.find("flower_1")


@pytest.mark.parametrize("name", ["\udcff", "a\0b", "blümchen"])
def test_what_can_be_no_name_is_an_unknown_one(store: Store, name: str):
    with pytest.raises(UnknownJob):
        store.find(name)


def test_a_transition_is_noted_with_its_time_cause_and_attempt(store: Store):
    store.add(job())
    assert store.move("one", State.QUEUED, State.PREPARING, 1001.0, attempt=1, owner=None)
    assert store.move("one", State.PREPARING, State.RUNNING, 1002.0, started=1002.0)
    assert store.move("one", State.RUNNING, State.FAILED, 1003.0, "it broke", ended=1003.0)
    stored = store.find("one")
    assert (stored.state, stored.started, stored.ended, stored.cause) == (State.FAILED, 1002.0, 1003.0, "it broke")
    steps = [
        (transition.source, transition.target, transition.at, transition.attempt, transition.cause)
        for transition in store.transitions("one")
    ]
    assert steps == [
        (None, State.QUEUED, 1000.5, 0, ""),
        (State.QUEUED, State.PREPARING, 1001.0, 1, ""),
        (State.PREPARING, State.RUNNING, 1002.0, 1, ""),
        (State.RUNNING, State.FAILED, 1003.0, 1, "it broke"),
    ]


def test_what_a_job_waits_for_is_said_anew_without_a_transition_and_only_while_it_waits(store: Store):
    store.add(job())
    store.move("one", State.QUEUED, State.PREPARING, 1001.0)
    for cause in ("waits for a node", "waits for its machines"):
        store.explain("one", State.PREPARING, cause)
        assert store.find("one").cause == cause
    store.move("one", State.PREPARING, State.RUNNING, 1002.0)
    store.explain("one", State.PREPARING, "too late")
    assert store.find("one").cause == ""
    assert [transition.cause for transition in store.transitions("one")] == ["", "", ""]


def test_a_job_that_was_moved_meanwhile_is_not_moved_again(store: Store):
    store.add(job())
    assert store.move("one", State.QUEUED, State.CANCELLED, 1001.0)
    assert not store.move("one", State.QUEUED, State.PREPARING, 1002.0)
    assert store.state("one") == State.CANCELLED
    assert not store.move("two", State.QUEUED, State.PREPARING, 1002.0)


def test_a_move_that_is_repeated_because_its_answer_was_lost_is_done_once(store: Store):
    store.add(job())
    assert [store.move("one", State.QUEUED, State.PREPARING, 1001.0) for _ in range(2)] == [True, True]
    assert len(store.transitions("one")) == 2


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(State), st.sampled_from(State))
def test_a_transition_that_is_none_is_refused(store: Store, source: State, target: State):
    if not may_follow(source, target):
        with pytest.raises(ValueError, match="never follows"):
            store.move("one", source, target, 1.0)


def test_of_two_who_want_the_same_transition_one_gets_it(opened: Callable[[], Store], store: Store):
    for number in range(20):
        store.add(job(f"job_{number}"))
    won: list[str] = []

    def grab(at: float) -> None:
        own = opened()
        won.extend(
            name for name in (f"job_{number}" for number in range(20))
            if own.move(name, State.QUEUED, State.PREPARING, at, attempt=1)
        )  # fmt: skip
        own.close()

    threads = [threading.Thread(target=grab, args=(2000.0 + number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == sorted(f"job_{number}" for number in range(20))


def test_stores_are_opened_at_once_for_the_first_time(opened: Callable[[], Store]):
    failed: list[Exception] = []

    def use(number: int) -> None:
        try:
            own = opened()
            own.add(job(f"job_{number}"))
            own.close()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(opened().list()) == 6


def test_a_file_that_another_is_about_to_write_is_waited_for_by_who_opens_it_first(tmp_path: Path):
    other = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")  # SQLite refuses a write-ahead log at once, without waiting
    ends = threading.Timer(0.3, other.close)
    ends.start()
    open_store(Home(tmp_path)).add(job())
    ends.join()


def test_lists_are_the_newest_first_and_of_a_state_or_a_machine(store: Store):
    store.add(job("old", created=1.0, queued=1.0))
    store.add(job("new", created=3.0, queued=3.0))
    store.add(job("elsewhere", created=2.0, queued=2.0, host="another"))
    store.move("old", State.QUEUED, State.PREPARING, 4.0)
    assert [summary.name for summary in store.list()] == ["new", "elsewhere", "old"]
    assert [summary.name for summary in store.list(limit=1)] == ["new"]
    assert store.count() == 3
    assert [summary.name for summary in store.list(State.PREPARING)] == ["old"]
    assert [supervised.name for supervised in store.of_host(HERE, SUPERVISED)] == ["old"]
    assert [(waiting.name, waiting.needs, waiting.since) for waiting in store.waiting(HERE)] == [
        ("new", Resources(1.5, 2, 7.5), 3.0)
    ]


def test_processes_are_noted_with_their_end(store: Store):
    store.add(job())
    process = Process(1, "worker", 0, pid=42, mark=7.0, began=5.0)
    store.begin_processes("one", [process, replace(process, role="master", pid=41)])
    store.end_processes("one", [replace(process, ended=6.0, outcome="ended with exit code 0")])
    assert store.processes("one") == [
        replace(process, role="master", pid=41),
        replace(process, ended=6.0, outcome="ended with exit code 0"),
    ]


def test_only_what_has_ended_is_deleted_and_then_nothing_is_left(store: Store):
    store.add(job())
    assert store.delete("one") == State.QUEUED
    store.move("one", State.QUEUED, State.CANCELLED, 2.0)
    assert store.delete("one") is None
    assert (store.state("one"), store.transitions("one"), store.processes("one")) == (None, [], [])


def between(store: Store, statement: str, happens: Callable[[], object]) -> None:
    """Run a function once in a store's next transactions, just before a statement with this beginning."""
    database = store._database
    execute, due = database._execute, [happens]  # pyright: ignore[reportAttributeAccessIssue]

    def watched(sql: str, *values: object) -> object:
        if sql.startswith(statement) and due:
            due.pop()()
        return execute(sql, *values)

    database._execute = watched  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.engine
def test_a_job_that_is_resubmitted_while_it_is_deleted_stays(postgres: Callable[[], Store]):
    store, other = postgres(), postgres()
    for number, statement in enumerate(("SELECT state", "UPDATE jobs SET state = state", "DELETE FROM jobs")):
        name = f"job_{number}"
        store.add(job(name))
        store.move(name, State.QUEUED, State.CANCELLED, 2.0)
        won: list[bool] = []
        thread = threading.Thread(target=lambda: won.append(other.move(name, State.CANCELLED, State.QUEUED, 3.0)))  # noqa: B023

        def resubmit(thread: threading.Thread = thread) -> None:
            thread.start()
            thread.join(1.0)  # it can't end before the deletion does where that holds the job's row

        between(store, statement, resubmit)
        left = store.delete(name)
        if not thread.ident:
            thread.start()
        thread.join()
        assert won == [left == State.QUEUED]
        assert other.state(name) == left
        assert bool(other.transitions(name)) == (left is not None)
        del store._database._execute  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.engine
def test_of_two_who_add_one_name_at_once_one_is_told_that_it_is_taken(postgres: Callable[[], Store]):
    store, other = postgres(), postgres()
    between(store, "INSERT INTO jobs", lambda: other.add(job()))
    with pytest.raises(WrongState, match="there is a job one already"):
        store.add(job(created=2000.0))
    assert other.find("one").created == 1000.5
    assert len(other.transitions("one")) == 1


def test_a_store_of_a_later_version_is_refused(opened: Callable[[], Store]):
    first = opened()
    first._database.transaction(lambda execute: execute("UPDATE schema_version SET version = 99"))
    first.close()
    with pytest.raises(ConfigError, match="version 99; this Footplate expects version 1"):
        opened()


def test_a_file_that_is_no_store_is_named(tmp_path: Path):
    (tmp_path / "jobs.db").write_bytes(b"something else entirely" * 100)
    with pytest.raises(ConfigError, match=r"jobs\.db, the store of jobs, can't be used: file is not a database"):
        open_store(Home(tmp_path))


def test_a_disk_that_is_full_is_named_and_nothing_is_half_written(tmp_path: Path):
    store = open_store(Home(tmp_path))
    ((pages,),) = store._database.read("PRAGMA page_count")
    store._database.read(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(ConfigError, match=r"jobs\.db, the store of jobs, can't be used: database or disk is full"):
        store.add(job(spec={"args": ["x" * 100_000]}))
    assert store.list() == []
    store.add(job())
    assert store.find("one") == job()


def test_the_file_is_the_users_alone(tmp_path: Path):
    open_store(Home(tmp_path)).close()
    assert (tmp_path / "jobs.db").stat().st_mode & 0o777 == 0o600


def test_an_address_that_is_none_is_refused_without_showing_its_password(tmp_path: Path):
    with pytest.raises(ConfigError, match="expected postgresql://"):
        open_store(Home(tmp_path, "mysql://me:mine@host/jobs"))


@pytest.mark.engine
def test_a_server_that_is_not_there_is_named_without_its_password(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1/jobs \(FOOTPLATE_STORE\) can't be used") as caught:
        open_store(Home(tmp_path, f"postgresql://me:mine@127.0.0.1:{free_port()}/jobs"))
    assert "mine" not in str(caught.value)


@pytest.mark.parametrize("password", ["my@secret", "my/secret", "my%zzsecret"])
def test_an_address_with_a_password_that_is_not_escaped_is_refused_without_showing_it(tmp_path: Path, password: str):
    with pytest.raises(ConfigError, match="In a password write %40 for @") as caught:
        open_store(Home(tmp_path, f"postgresql://me:{password}@127.0.0.1:1/jobs"))
    assert "secret" not in str(caught.value)


@pytest.mark.engine
def test_a_server_that_restarts_is_waited_for(server: Server, tmp_path: Path):
    store = open_store(Home(tmp_path, f"postgresql://jobs@127.0.0.1:{server.port}/postgres"))
    store.add(job())
    server.stop()
    back = threading.Timer(1.0, server.start)
    back.start()
    assert store.move("one", State.QUEUED, State.PREPARING, 1001.0)
    back.join()
    assert store.state("one") == State.PREPARING
    store.close()
