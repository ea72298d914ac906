"""Cases that only a Ray cluster has, on a real one: missing accelerators, drivers that die, full nodes."""

from __future__ import annotations

import os
import shutil
import signal
import time

import psutil
import pytest

from footplate.jobs.backends.ray import entrypoint
from footplate.jobs.home import Home
from footplate.jobs.package.environment_locks import Hold
from footplate.jobs.states import State
from footplate.jobs.supervision.cleaning import NODE_UNUSED_S
from footplate.jobs.supervision.identity import Identity
from jobs.backends.places import Place
from jobs.backends.ray_backend import RayCluster
from jobs.conftest import Bench, until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.parametrize("place", ["ray"], indirect=True)]


ON_T4 = """
trainingInput:
  scaleTier: CUSTOM
  masterType: n1-standard-8
  masterConfig:
    acceleratorConfig: {count: 2, type: NVIDIA_TESLA_T4}
"""
WAITS = "waits for a node with 2 T4; the Ray cluster has 2 nodes of 8 CPU"


def test_a_job_waits_for_accelerators_says_so_and_can_be_cancelled(bench: Bench, place: Place):
    bench.program("")
    _, said = bench.submit(text=ON_T4, job_dir="gs://bucket/out")
    assert said == (
        "No node of the Ray cluster has 2 T4 for a master of 8 CPU and 2 T4. The job waits until there is one. It has 2 "
        "nodes of 8 CPU."
    )
    until(lambda: bench.jobs.find("my_job").cause == WAITS)
    assert bench.jobs.store.state("my_job") == State.PREPARING
    bench.jobs.cancel("my_job")
    assert bench.jobs.wait("my_job").state == State.CANCELLED
    assert bench.states() == ["QUEUED", "PREPARING", "CANCELLING", "CANCELLED"]


def test_a_job_that_the_cluster_makes_wait_for_too_long_is_cancelled(bench: Bench, place: RayCluster):
    bench.program("")
    bench.submit(text=ON_T4, job_dir="gs://bucket/out", max_wait_time="1800s")
    until(lambda: bench.jobs.find("my_job").cause == WAITS)
    killed, store = bench.supervisor(), bench.jobs.store
    os.kill(killed, signal.SIGKILL)
    until(lambda: Identity.of(killed) is None)
    now = time.time()
    store.move("my_job", State.PREPARING, State.PREPARING, now, queued=now - 3600)  # as if it had waited for an hour
    job = bench.jobs.wait("my_job")
    assert (job.state, job.cause) == (State.CANCELLED, "it has waited for 1800s, its maximum waiting time")
    until(lambda: (info := place.client.info(f"{job.id}-1")) and info.ended)


def test_what_attempts_have_left_on_a_node_is_deleted_by_a_later_one(bench: Bench, place: RayCluster):
    bench.program('print(os.getcwd(), flush=True); (place / "began").touch(); until_there("go")')
    node = Home(place.home)
    old = [node.root / "environments/old", node.root / "unpacked/boot/old", node.node_directory("ended-1")]
    used = node.root / "environments/used"
    young = node.root / "environments/young"
    for path in (*old, used, young):
        (path / "lib").mkdir(parents=True)
        (path / "lib/module.py").touch()
        if path != young:
            os.utime(path, (time.time() - NODE_UNUSED_S - 60,) * 2)
    hold = Hold(used.with_suffix(".lock"))
    try:
        submitted_in = bench.directory / "elsewhere"
        submitted_in.mkdir()
        os.chdir(submitted_in)
        bench.submit()
        os.chdir(bench.directory)
        shutil.rmtree(submitted_in)
        bench.there("began")
        until(lambda: not any(path.exists() for path in old))
        assert used.exists()
        assert young.exists()
        (bench.directory / "go").touch()
        job = bench.jobs.wait("my_job")
        assert job.state == State.SUCCEEDED, job.cause
        directory = node.node_directory(f"{job.id}-1")
        assert bench.output() == f"{directory}\n"
        assert directory.is_dir()
    finally:
        hold.release()
        for path in (used, young):
            shutil.rmtree(path)


def test_a_killed_driver_takes_its_replicas_along_and_is_not_the_programs_fault(bench: Bench, place: Place):
    bench.program(
        """
        (place / f"begun-{attempt}.part").write_text(str(os.getpid()))
        (place / f"begun-{attempt}.part").rename(place / f"begun-{attempt}")
        if attempt == 1:
            time.sleep(600)
        print("again")
        """
    )
    bench.submit()
    replica = psutil.Process(int(bench.there("begun-1").read_text()))
    bench.is_in(State.RUNNING)
    _driver(bench).kill()
    until(lambda: not replica.is_running())
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt, job.failures, job.losses) == (State.SUCCEEDED, 2, 0, 1), job.cause
    assert bench.output(attempt=2) == "again\n"


def _driver(bench: Bench) -> psutil.Process:
    """The driver process of a job of this test."""
    drivers = [
        one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [])[-1:] == [entrypoint.__name__]
    ]
    (found,) = [one for one in drivers if str(bench.directory) in one.environ().get(entrypoint.VARIABLE, "")]
    return found
