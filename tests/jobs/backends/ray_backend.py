"""A real Ray cluster of two nodes on this machine, with its dashboard, for a whole session."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest
from ports import free_port

from footplate.jobs.backends.ray.client import Away, Client
from jobs.backends.places import Kind
from jobs.conftest import Bench, until

SMALL = {"num_cpus": 8, "object_store_memory": 80_000_000}  # one n1-standard-8 each
# Without what no test needs: two monitors, a worker for each core in advance, and metrics. A killed node counts as lost
# after 2.5 s, not after 15 s. A node that is only slow has 50 s for an answer, as usual.
HEAD = {
    "include_dashboard": True,
    "include_log_monitor": False,
    "no_monitor": True,
    "_system_config": {
        "health_check_period_ms": 500,
        "prestart_worker_first_driver": False,
        "enable_metrics_collection": False,
    },
}


class RayCluster:
    """The ray backend.

    Attributes:
        client: its Jobs API.
        home: the directory in which both nodes keep packages.
    """

    kind = Kind("ray")
    variables: Mapping[str, str] = MappingProxyType({})

    def __init__(self, cluster: Any, address: str, home: str) -> None:
        self._cluster = cluster
        self.home = Path(home)
        self._address = address
        self.client = Client(address)
        self._second: Any = None
        self.whole()

    @property
    def options(self) -> Mapping[str, str]:
        """The command-line options of this cluster."""
        return {"address": self._address}

    def whole(self) -> None:
        """Start the second node if it is missing."""
        if self._second is None:
            with _at_home(str(self.home)):
                self._second = self._cluster.add_node(**SMALL)
        until(lambda: len(self._nodes()) == 2)

    def lose_a_machine(self, bench: Bench) -> None:
        """Kill the second node and everything that runs on it."""
        raylet = psutil.Process(self._second.all_processes["raylet"][0].process.pid)
        for process in [raylet, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._second = None

    def close(self) -> None:
        """Stop the jobs that a test has left."""
        from ray.job_submission import JobSubmissionClient

        ray = JobSubmissionClient(self._address)
        left = [job.submission_id for job in ray.list_jobs() if job.submission_id and not job.status.is_terminal()]
        for key in left:
            ray.stop_job(key)
        for key in left:
            until(lambda key=key: ray.get_job_status(key).is_terminal())
        self.whole()

    def _nodes(self) -> Mapping[str, Any]:
        try:
            return self.client.nodes()
        except Away:
            return {}


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """The cluster. Its nodes keep packages in a home of their own."""
    import ray
    from ray.cluster_utils import Cluster

    place = tempfile.mkdtemp(prefix="fp", dir="/tmp")  # the paths of Ray's sockets must be short
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        # Another cluster of this machine may have Ray's usual port for the agent that takes jobs.
        ports = {"dashboard_port": port, "dashboard_agent_listen_port": free_port()}
        head = {**ports, "temp_dir": f"{place}/ray", **HEAD, **SMALL}
        # Ray writes the cluster's address there, and makes the directory only for its usual `temp_dir`.
        Path(ray._private.utils.get_ray_address_file(None)).parent.mkdir(exist_ok=True)
        with _at_home(f"{place}/home"):
            cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield RayCluster(cluster, f"http://127.0.0.1:{port}", f"{place}/home")
        finally:
            cluster.shutdown()
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _at_home(home: str) -> Iterator[None]:
    """Processes started within this context keep packages in this home, and their `python` is the one with Ray."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOOTPLATE_HOME", home)
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        yield
