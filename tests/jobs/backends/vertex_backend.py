"""Vertex AI, Cloud Logging and Cloud Storage on loopback, for a whole session, as a backend that runs jobs."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from object_storage import serve_gcs
from ports import free_port

from jobs.backends.places import Kind
from jobs.backends.vertex_server import Cloud, serve
from jobs.conftest import Bench


class VertexProject:
    """The vertex backend.

    Attributes:
        cloud: the services behind it.
    """

    kind = Kind("vertex", bucket="gs://lake", tells_each_end=False, keeps_bytes=False)

    def __init__(self, cloud: Cloud, storage: str, services: str) -> None:
        self.cloud = cloud
        self.options = {"project": "my-project", "staging-bucket": "gs://lake/staging"}
        self.variables = {
            "STORAGE_EMULATOR_HOST": storage,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM": services,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_LOGGING": services,
        }

    def lose_a_machine(self, bench: Bench) -> None:
        """Switch off the job's machines."""
        self.cloud.runs[-1].lost.set()

    def close(self) -> None:
        """Switch off the remaining machines of a test, and clear the state."""
        self.cloud.renew()


@contextlib.contextmanager
def vertex_project() -> Iterator[VertexProject]:
    """The project. Its machines have their disks in a directory of their own."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory, serve_gcs(port):
        cloud = Cloud(f"127.0.0.1:{port}", Path(directory))
        with serve(cloud) as services:
            yield VertexProject(cloud, f"http://127.0.0.1:{port}", services)
