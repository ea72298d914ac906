"""Jobs whose store is a real PostgreSQL server."""

from __future__ import annotations

import os
import socket

import pytest

from footplate.jobs.operations import Jobs
from footplate.jobs.states import State
from footplate.jobs.store.postgres import VANISHED_MS
from footplate.jobs.supervision import supervisor
from jobs.conftest import Bench
from jobs.test_store import Server, server  # noqa: F401  a fixture

pytestmark = pytest.mark.engine


@pytest.fixture
def team(bench: Bench, server: Server, monkeypatch: pytest.MonkeyPatch) -> Bench:  # noqa: F811
    monkeypatch.setenv("FOOTPLATE_STORE", f"postgresql://jobs@127.0.0.1:{server.port}/postgres")
    alone, bench.jobs = bench.jobs, Jobs.from_env()
    alone.store.close()
    return bench


def test_a_job_runs_and_a_killed_one_begins_anew(team: Bench):
    team.program(
        "(place / f'begun-{attempt}').touch(); attempt == 1 and os.kill(os.getppid(), signal.SIGKILL); print(1)"
    )
    team.submit()
    job = team.jobs.wait("my_job")
    assert (job.state, job.attempt, job.losses) == (State.SUCCEEDED, 2, 1), job.cause
    assert team.output(attempt=2) == "1\n"
    team.jobs.delete("my_job")


def test_a_program_runs_on_while_the_server_is_away(team: Bench, server: Server):  # noqa: F811
    team.program(
        """
        until_there("away")
        print("x" * 1_000_000, flush=True)
        (place / "written").touch()
        """
    )
    team.submit()
    team.is_in(State.RUNNING)
    server.stop()
    (team.directory / "away").touch()
    team.there("written")
    server.start()
    job = team.jobs.wait("my_job")
    assert (job.state, job.attempt) == (State.SUCCEEDED, 1), job.cause
    assert team.states() == ["QUEUED", "PREPARING", "RUNNING", "SUCCEEDED"]


def test_a_server_that_has_vanished_is_not_waited_for_longer_than_a_moment(team: Bench):
    """The situation after its machine was switched off: no packet arrives any more, not even a refusal."""
    connection = team.jobs.store._database._connection  # pyright: ignore[reportAttributeAccessIssue]
    with socket.socket(fileno=os.dup(connection.fileno())) as wire:
        assert wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == VANISHED_MS <= 1000 * supervisor.GRACE_S
