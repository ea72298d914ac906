"""Backends of the conformance suite, each created for its first test; and a Vertex AI for single attempts."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from footplate.jobs.backends.vertex import creation
from jobs.backends.places import Place, ThisMachine
from jobs.backends.vertex_server import Cloud, serve
from jobs.conftest import Bench

ENGINE = [pytest.mark.engine, pytest.mark.slow]
PLACES = [
    pytest.param("local"),
    pytest.param("ray", marks=ENGINE),
    pytest.param("slurm", marks=ENGINE),
    pytest.param("vertex", marks=ENGINE),
]


@pytest.fixture(scope="package")
def stack() -> Iterator[ExitStack]:
    """Closes the backends before the tests of other folders, which would find a running Ray."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="package")
def made(stack: ExitStack, request: pytest.FixtureRequest) -> Callable[[str], Place]:
    """Return a backend, and create it at the first request."""

    @functools.cache
    def make(name: str) -> Place:
        if name == "ray":
            from jobs.backends.ray_backend import ray_cluster

            return stack.enter_context(ray_cluster())
        if name == "slurm":
            from jobs.backends.slurm_backend import Slurm

            return Slurm(request.getfixturevalue("slurm"))
        if name == "vertex":
            from jobs.backends.vertex_backend import vertex_project

            return stack.enter_context(vertex_project())
        return ThisMachine()

    return make


@pytest.fixture(params=PLACES)
def place(
    request: pytest.FixtureRequest, made: Callable[[str], Place], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """The backend on which the test's jobs run."""
    there = made(request.param)
    bench.backend, bench.options = there.kind.backend, there.options
    if there.kind.bucket is not None:
        bench.job_dir = f"{there.kind.bucket}/{uuid.uuid4().hex}"
    for name, value in there.variables.items():
        monkeypatch.setenv(name, value)
    yield there
    there.close()


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """A Vertex AI that runs no jobs, for an attempt in this process that polls it at short intervals."""
    from footplate.jobs.backends.vertex import attempt

    cloud = Cloud("", tmp_path)
    cloud.executes = False
    monkeypatch.setattr(creation, "SETTLED_S", 0.5)
    for name, value in {"STATE_S": (0.02, 0.1), "OUTPUT_S": (0.02, 0.1), "AGAIN_S": (0.02, 0.1),
                        "QUIET_S": 0.3, "ENDING_PACE_S": 0.05, "REFUSED_S": 0.1}.items():  # fmt: skip
        monkeypatch.setattr(attempt, name, value)
    with serve(cloud) as address:
        for service in ("AIPLATFORM", "LOGGING"):
            monkeypatch.setenv(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service}", address)
        yield cloud
