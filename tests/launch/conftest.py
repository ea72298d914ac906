"""Fixtures of the launch tests: programs to kill, and a check that no process is left behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import template
from cut_off import STEPS, TRAINING, train
from launched import Program, pooled_pids
from ray_nodes import end_ray_nodes, is_rays
from sessions import end_spark_session, is_sparks

from footplate.launch import Restarts, launch


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End an engine that files share, before a test of another file: a launch there would find it."""
    file = nextitem.path.name if nextitem is not None and nextitem.path.parent == Path(__file__).parent else None
    if file not in ("test_conformance.py", "test_ray.py"):
        end_ray_nodes()
    if file not in ("test_conformance.py", "test_ray.py", "test_spark.py"):
        end_spark_session()


@pytest.fixture
def quick() -> Restarts:
    """A restart policy without long waits."""
    return Restarts(peers_grace_s=0.3, max_delay_s=0.1)


@pytest.fixture
def quick_but_patient() -> Restarts:
    """A restart policy without long waits, for ranks that all end by themselves at different times."""
    return Restarts(peers_grace_s=60, max_delay_s=0.1)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a training in two processes that nothing interrupts."""
    directory = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert launch(train, directory, 0.0, world_size=2, preload=TRAINING) == STEPS
    return directory


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    """Check that a test's launches leave no process, except fork servers in the pool, their template, and engines."""
    before = set(psutil.Process().children(recursive=True))
    yield
    pooled = {psutil.Process(pid) for pid in pooled_pids()}
    now = {
        process for process in psutil.Process().children(recursive=True) if not (is_rays(process) or is_sparks(process))
    }
    now = {process for process in now if not template.is_template(process.pid)}
    left = now - before - pooled
    assert not psutil.wait_procs(list(left), timeout=20)[1]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The supervisor's log."""
    with caplog.at_level(logging.INFO, "footplate.launch"):
        yield caplog


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    """Return a function that starts a program, given as text, in a process of its own."""
    started: list[Program] = []

    def start(text: str) -> Program:
        started.append(Program(text, tmp_path))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.wait()
        running.process.stdout.close()
