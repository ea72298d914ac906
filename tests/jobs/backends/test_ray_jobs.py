"""Cases that only a Ray cluster has, on a real one: missing accelerators, drivers that die, full nodes."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from footplate.jobs.backends.ray import entrypoint
from footplate.jobs.home import Home
from footplate.jobs.package.environment_locks import Hold
from footplate.jobs.states import State
from footplate.jobs.supervision.cleaning import NODE_UNUSED_S
from footplate.jobs.supervision.identity import Identity
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


@dataclass(frozen=True)
class Leftovers:
    """Directories of other attempts on the nodes.

    Attributes:
        old: unused for a long time.
        used: unused for a long time by its own clock, and still in use.
        young: used a moment ago.
    """

    old: tuple[Path, ...]
    used: Path
    young: Path


@pytest.fixture
def on_the_node(place: RayCluster) -> Iterator[Leftovers]:
    node = Home(place.home)
    left = Leftovers(
        (node.root / "environments/old", node.root / "unpacked/boot/old", node.node_directory("ended-1")),
        node.root / "environments/used",
        node.root / "environments/young",
    )
    for path in (*left.old, left.used, left.young):
        (path / "lib").mkdir(parents=True)
        (path / "lib/module.py").touch()
        if path != left.young:
            old_s = time.time() - NODE_UNUSED_S - 60
            os.utime(path, (old_s, old_s))
    hold = Hold(left.used.with_suffix(".lock"))
    yield left
    hold.release()
    for path in (left.used, left.young):
        shutil.rmtree(path)


def test_a_job_waits_for_accelerators_says_so_and_is_cancelled_when_it_waits_for_too_long(
    bench: Bench, place: RayCluster
):
    bench.program("")
    _, said = bench.submit(text=ON_T4, job_dir="gs://bucket/out", max_wait_time="1800s")
    assert said == (
        "No node of the Ray cluster has 2 T4 for a master of 8 CPU and 2 T4. The job waits until there is one. It has 2 "
        "nodes of 8 CPU."
    )
    until(lambda: bench.jobs.find("my_job").cause == WAITS)
    assert bench.jobs.store.state("my_job") == State.PREPARING

    killed, store = bench.supervisor(), bench.jobs.store
    os.kill(killed, signal.SIGKILL)
    until(lambda: Identity.of(killed) is None)
    now = time.time()
    store.move("my_job", State.PREPARING, State.PREPARING, now, queued=now - 3600)  # as if it had waited for an hour
    job = bench.jobs.wait("my_job")
    assert (job.state, job.cause) == (State.CANCELLED, "it has waited for 1800s, its maximum waiting time")
    assert bench.states() == ["QUEUED", "PREPARING", "PREPARING", "CANCELLING", "CANCELLED"]
    until(lambda: (info := place.client.info(f"{job.id}-1")) and info.ended)


def test_a_killed_driver_takes_its_replicas_along_and_is_not_the_programs_fault(
    bench: Bench, place: RayCluster, on_the_node: Leftovers
):
    """The first attempt also deletes what other attempts have left on the node."""
    bench.program(
        """
        print(os.getcwd(), flush=True)
        (place / f"begun-{attempt}.part").write_text(str(os.getpid()))
        (place / f"begun-{attempt}.part").rename(place / f"begun-{attempt}")
        if attempt == 1:
            time.sleep(600)
        print("again")
        """
    )
    submitted_in = bench.directory / "elsewhere"
    submitted_in.mkdir()
    os.chdir(submitted_in)
    bench.submit()
    os.chdir(bench.directory)
    shutil.rmtree(submitted_in)
    replica = psutil.Process(int(bench.there("begun-1").read_text()))
    until(lambda: not any(path.exists() for path in on_the_node.old))
    assert on_the_node.used.exists()
    assert on_the_node.young.exists()

    bench.is_in(State.RUNNING)
    _driver(bench).kill()
    until(lambda: not replica.is_running())
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt, job.failures, job.losses) == (State.SUCCEEDED, 2, 0, 1), job.cause
    directory = Home(place.home).node_directory(f"{job.id}-2")
    assert bench.output(attempt=2) == f"{directory}\nagain\n"
    assert directory.is_dir()


def _driver(bench: Bench) -> psutil.Process:
    """The driver process of a job of this test."""
    drivers = [
        process
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [])[-1:] == [entrypoint.__name__]
    ]
    (driver,) = [
        process for process in drivers if str(bench.directory) in process.environ().get(entrypoint.VARIABLE, "")
    ]
    return driver
