"""One attempt at a job on a loopback Vertex AI (the fixture `cloud`), in the test's own process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from footplate.jobs.backends.vertex.attempt import CustomJob
from footplate.jobs.backends.vertex.client import Client
from footplate.jobs.backends.vertex.request import LABEL, mark
from jobs.backends.vertex_server import Cloud, Run

PLACE = "/v1/projects/my-project/locations/us-central1/customJobs"
KEY = "my_job-1700000000000000-1"
PATIENCE_S = 60.0


def wish() -> dict[str, Any]:
    """The request that creates the attempt."""
    return {"displayName": "my_job", "labels": {LABEL: mark(KEY)}, "jobSpec": {"workerPoolSpecs": []}}


def begin(folder: Path, body: Callable[[], dict[str, Any]] = wish) -> CustomJob:
    """Begin the attempt, or adopt it if it exists."""
    replica_ids = [("master", 0), ("worker", 0)]
    return CustomJob(Client("my-project", "us-central1"), PLACE, KEY, folder, replica_ids, 1, body)


def created(cloud: Cloud) -> Run:
    """A CustomJob with the attempt's label that another process has created."""
    return cloud.create(PLACE.removeprefix("/v1/"), wish())


def until(attempt: CustomJob, condition: Callable[[], object]) -> None:
    """Read the attempt's events until a condition is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        attempt.wait(0.05)
        assert time.monotonic() < deadline, "it never happened"
