"""Backends: where the workers of a launch run. The contract, the backends by name, and which one a process uses.

    backend.slots()                               how many workers it can hold at once
    backend.worker_group(payload_fd, …)           starts the workers and talks to them (`worker_group.py`), for one launch

There are two kinds. `Local` forks workers on this machine. `Cluster` runs them on other machines, where an agent controls
the workers of its machine. Cluster engines differ only in how agents are started, by a `Placement`
(`cluster/agent_group.py`; `ray.py`, `spark.py`). Nothing of a cluster engine is imported before it is used.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from footplate.core.errors import ConfigError, LaunchError, did_you_mean
from footplate.launch.local import LocalWorkerGroup
from footplate.launch.worker_group import WorkerGroup

if TYPE_CHECKING:
    from footplate.launch.cluster.placement import Placement

_PLACEMENTS = {
    "ray": ("footplate.launch.cluster.ray", "RayPlacement"),
    "spark": ("footplate.launch.cluster.spark", "SparkPlacement"),
}
NAMES = ("local", *_PLACEMENTS)
TLS_ALONE = "TLS is for connections to other machines, and there are none. Leave it out, or name a cluster."


class Backend(Protocol):
    """The place where the workers of a launch run; see the module's docstring."""

    @property
    def name(self) -> str:
        """`"local"`, `"ray"`, `"spark"`."""
        ...

    def slots(self) -> int:
        """The number of workers that it can hold at once, now."""
        ...

    def worker_group(
        self, payload_fd: int, environment: Mapping[str, str], preload: Sequence[str], world_size: int
    ) -> WorkerGroup:
        """Make the worker group of one launch.

        Args:
            payload_fd: descriptor of the payload with the function and its arguments; open until the group is closed.
            environment: variables for all workers, over those of their machines.
            preload: modules that each machine imports once, before workers are forked.
            world_size: how many workers the first attempt has; later attempts have as many or fewer.

        Raises:
            LaunchError: there are fewer slots.
        """
        ...


@dataclass(frozen=True)
class Local:
    """Processes of this machine. There may be more of them than slots: they then share cores and devices."""

    name: str = field(default="local", init=False)

    def slots(self) -> int:
        """The number of devices of the best accelerator here; if that is the CPU, the number of cores."""
        from footplate.hardware.machine import usable_cores
        from footplate.hardware.registry import choose_auto

        accelerator = choose_auto()
        return max(1, int(usable_cores())) if accelerator.name == "cpu" else len(accelerator.devices())

    def worker_group(
        self, payload_fd: int, environment: Mapping[str, str], preload: Sequence[str], world_size: int
    ) -> WorkerGroup:
        return LocalWorkerGroup(payload_fd, environment, preload, keep=True)


@dataclass(frozen=True)
class Cluster:
    """Processes on the machines of a cluster, where `placement` starts agents.

    With `tls`, the connections to agents are encrypted.
    """

    placement: Placement
    tls: bool = False

    @property
    def name(self) -> str:
        return self.placement.name

    def slots(self) -> int:
        return self.placement.slots()

    def worker_group(
        self, payload_fd: int, environment: Mapping[str, str], preload: Sequence[str], world_size: int
    ) -> WorkerGroup:
        from footplate.core.net.tls import ServerKey
        from footplate.launch.cluster.agent_group import AgentGroup

        slots = self.placement.slots(world_size)
        if slots < min(world_size, self.placement.min_workers or world_size):
            raise LaunchError(
                f"np={world_size}: {self.name} can hold {slots} worker(s) of this shape now. Use np={slots} at most, "
                "np=0 for all of them, give each less with resources=…, or add machines."
            )
        return AgentGroup(self.placement, payload_fd, environment, preload, ServerKey() if self.tls else None)


def named(name: str, resources: Mapping[str, Any] | None = None, tls: bool = False) -> Backend:
    """Make the backend of this name.

    Args:
        name: one of `NAMES`.
        resources: the needs of a worker, as arguments of the backend's placement.
        tls: whether connections to other machines are encrypted.

    Raises:
        ConfigError: there is no such backend, it doesn't know these resources, or it has no other machines for TLS.
        MissingExtra: its engine is not installed.
        LaunchError: its cluster can't be reached.
    """
    if name not in NAMES:
        raise ConfigError(f'backend="{name}": there is no such backend. {did_you_mean(name, NAMES)}')
    needs = dict(resources or {})
    if name == "local":
        if needs:
            raise ConfigError(
                f'resources={needs!r} with backend="local": local processes share the machine. Leave resources out.'
            )
        if tls:
            raise ConfigError(TLS_ALONE)
        return Local()
    module, placement = _PLACEMENTS[name]
    kind = getattr(importlib.import_module(module), placement)
    known = inspect.signature(kind).parameters
    for key in needs:
        if key not in known:
            raise ConfigError(f'resources={{"{key}": …}} with backend="{name}": {did_you_mean(key, known)}')
    return Cluster(kind(**needs), tls)


def connected_cluster(environ: Mapping[str, str] = os.environ) -> str | None:
    """The name of the cluster that this process is connected to, or should use; None without one.

    Ray counts if it is initialised or `RAY_ADDRESS` is set. Spark counts if any thread of this process has a session. A
    connection that the process has made comes before `RAY_ADDRESS`.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return "ray"
    if _has_spark_session():
        return "spark"
    return "ray" if environ.get("RAY_ADDRESS") else None


def _has_spark_session() -> bool:
    """Return True if this process has a Spark session.

    A session of Spark Connect belongs to a thread. It counts, and is refused later.
    """
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    if context is not None and context._active_spark_context is not None:
        return True
    sql = sys.modules.get("pyspark.sql")
    return sql is not None and sql.SparkSession.getActiveSession() is not None
