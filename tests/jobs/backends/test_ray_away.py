"""A Ray cluster that can't be reached: what a job's supervisor says, when it gives up, and a token that is asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from footplate.jobs.backends.local import machine
from footplate.jobs.backends.ray import attempt
from footplate.jobs.execution import Execution, Role
from footplate.jobs.home import Home
from footplate.jobs.record import Job
from footplate.jobs.states import State
from footplate.jobs.store import open_store
from footplate.jobs.store.jobs import Store
from footplate.jobs.supervision import supervisor

ADDRESS = "http://127.0.0.1:1"  # no process listens here
LEFT = f"the Ray cluster at {ADDRESS} can't be told to end the job, which may go on there: ray job stop "


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A home whose supervisors, in this process, have a short time limit."""
    monkeypatch.setenv("FOOTPLATE_HOME", str(tmp_path))
    monkeypatch.delenv("FOOTPLATE_STORE", raising=False)
    monkeypatch.setattr(supervisor, "GRACE_S", 0.0)
    monkeypatch.setattr(attempt, "UNREACHED_S", 0.0)
    handler = signal.getsignal(signal.SIGTERM)
    yield Home.from_env()
    signal.signal(signal.SIGTERM, handler)


def submitted(home: Home, state: State, waited_s: float = 0.0, **spec: Any) -> tuple[Store, Job]:
    """A job whose first attempt was handed to the cluster by a supervisor that has died."""
    place = {"address": ADDRESS}
    plan = Execution("my_job", (Role("master", 1),), (), None, "/work", 604800.0, "digest", "", "", spec, place)
    since = time.time() - waited_s
    job = Job("my_job", state, since, since, machine.host(), "ray", attempt=1, plan=plan.to_dict())
    folder = home.attempt("my_job", 1)
    folder.mkdir(parents=True)
    (folder / attempt.MARK).write_text(attempt.SUBMITTED)
    store = open_store(home)
    store.add(job)
    return store, job


def test_a_cancelled_job_says_that_it_may_go_on_where_nobody_could_be_told(home: Home):
    store, job = submitted(home, State.CANCELLING)
    supervisor.main("my_job")
    stored = store.find("my_job")
    assert (stored.state, stored.cause) == (State.CANCELLED, f"{LEFT}{job.id}-1")


def test_a_job_that_waits_for_its_cluster_waits_no_longer_than_it_was_to(home: Home):
    store, job = submitted(home, State.PREPARING, 3600.0, scheduling={"maxWaitTime": "1800s"})
    supervisor.main("my_job")
    stored = store.find("my_job")
    waited = "it has waited for 1800s, its maximum waiting time"
    assert (stored.state, stored.cause) == (State.CANCELLED, f"{waited}; {LEFT}{job.id}-1")
    assert [transition.target for transition in store.transitions("my_job")] == [
        State.PREPARING,
        State.CANCELLING,
        State.CANCELLED,
    ]


def test_a_job_that_has_begun_before_waits_for_its_cluster_as_long_as_it_takes(home: Home, monkeypatch):
    store, job = submitted(home, State.PREPARING, 3600.0, scheduling={"maxWaitTime": "1800s"})
    store.move("my_job", State.PREPARING, State.PREPARING, time.time(), "a new attempt", started=job.created)
    began = attempt.RayAttempt.wait

    def cancelled_once_it_waits(self: attempt.RayAttempt, timeout_s: float) -> Any:
        if store.find("my_job").cause.startswith(f"waits for the Ray cluster at {ADDRESS}: "):
            store.move("my_job", State.PREPARING, State.CANCELLING, time.time(), "cancelled by the user")
        return began(self, timeout_s)

    monkeypatch.setattr(attempt.RayAttempt, "wait", cancelled_once_it_waits)
    supervisor.main("my_job")
    assert store.find("my_job").cause == f"{LEFT}{job.id}-1"
    assert store.transitions("my_job")[-2].cause == "cancelled by the user"


def test_a_cluster_that_asks_for_a_token_gets_it_and_one_without_is_told_how():
    """Ray reads these variables once in a process, so other processes ask."""

    class Nodes(BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.headers.get("authorization") == "Bearer a-token-of-this-cluster"
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(b'{"data": {"result": {"result": []}}}')

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Nodes) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        program = f"from footplate.jobs.backends.ray.client import Client; print(Client({address!r}).nodes())"
        asked = [
            subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True,
                env={**os.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "a-token-of-this-cluster"},
            )
            for mode in ("token", "disabled")
        ]  # fmt: skip
        server.shutdown()
    assert asked[0].stdout == "{}\n", asked[0].stderr
    assert "401: Unauthorized. The cluster asks for a token: set RAY_AUTH_MODE=token" in asked[1].stderr
