"""Where the workers of a launch live: the contract, the backends by name, and which of them is meant.

    backend.slots()                       how many workers it can hold at once
    backend.crew(payload, …, world_size)  who starts them and talks to them (`crew.py`): one for each launch

There are two kinds. `Local` forks workers on this machine. `Cluster` has them on other machines: an agent there looks after
the workers of its machine, and what differs between cluster engines is only who starts the agents, a `Placement`
(`cluster/`: `crew.py`; `ray.py`, `spark.py`). Nothing of a cluster engine is imported before it is asked for.
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
from footplate.launch.crew import Crew
from footplate.launch.local import LocalCrew

if TYPE_CHECKING:
    from footplate.launch.cluster.crew import Placement

_PLACEMENTS = {
    "ray": ("footplate.launch.cluster.ray", "RayPlacement"),
    "spark": ("footplate.launch.cluster.spark", "SparkPlacement"),
}
NAMES = ("local", *_PLACEMENTS)


class Backend(Protocol):
    """See the module's docstring."""

    @property
    def name(self) -> str:
        """`"local"`, `"ray"`, `"spark"`."""
        ...

    def slots(self) -> int:
        """How many workers it can hold at once, now."""
        ...

    def crew(self, payload: int, environment: Mapping[str, str], preload: Sequence[str], world_size: int) -> Crew:
        """Who carries one launch.

        Args:
            payload: descriptor of the parcel with the function and its arguments; open until the crew is closed.
            environment: variables for all workers, over those that a process has there.
            preload: modules that are imported once on each machine, before workers are forked.
            world_size: how many workers the first attempt has; later ones have as many or fewer.

        Raises:
            LaunchError: there are fewer slots.
        """
        ...


@dataclass(frozen=True)
class Local:
    """Processes of this machine. They may be more than it has slots: they then share cores and devices."""

    name: str = field(default="local", init=False)

    def slots(self) -> int:
        """The devices of the best accelerator here; where that is the CPU, the cores."""
        from footplate.hardware.machine import usable_cores
        from footplate.hardware.registry import choose_auto

        accelerator = choose_auto()
        return max(1, int(usable_cores())) if accelerator.name == "cpu" else len(accelerator.devices())

    def crew(self, payload: int, environment: Mapping[str, str], preload: Sequence[str], world_size: int) -> Crew:
        return LocalCrew(payload, environment, preload, keep=True)


@dataclass(frozen=True)
class Cluster:
    """Processes on the machines of a cluster, where `placement` starts agents."""

    placement: Placement

    @property
    def name(self) -> str:
        return self.placement.name

    def slots(self) -> int:
        return self.placement.slots()

    def crew(self, payload: int, environment: Mapping[str, str], preload: Sequence[str], world_size: int) -> Crew:
        from footplate.launch.cluster.crew import ClusterCrew

        slots = self.slots()
        if world_size > slots:
            raise LaunchError(
                f"np={world_size}: {self.name} has room for {slots} worker(s) of this shape now. Use np={slots} at most, "
                "np=0 for all of them, ask for less of each with resources=…, or add machines."
            )
        return ClusterCrew(self.placement, payload, environment, preload)


def named(name: str, resources: Mapping[str, Any] | None = None) -> Backend:
    """The backend of this name.

    Args:
        name: one of `NAMES`.
        resources: what a worker needs, in the backend's words: the arguments of its placement.

    Raises:
        ConfigError: no such backend, or resources that it doesn't know.
        MissingExtra: its engine is not installed.
        LaunchError: its cluster can't be reached.
    """
    if name not in NAMES:
        raise ConfigError(f'backend="{name}": there is none of this name. {did_you_mean(name, NAMES)}')
    given = dict(resources or {})
    if name == "local":
        if given:
            raise ConfigError(
                f'resources={given!r} with backend="local": local processes share the machine. Leave resources out.'
            )
        return Local()
    module, placement = _PLACEMENTS[name]
    kind = getattr(importlib.import_module(module), placement)
    known = inspect.signature(kind).parameters
    for key in given:
        if key not in known:
            raise ConfigError(f'resources={{"{key}": …}} with backend="{name}": {did_you_mean(key, known)}')
    return Cluster(kind(**given))


def found(environ: Mapping[str, str] = os.environ) -> str | None:
    """The name of the cluster that this process is connected to, or is told to use; None without one.

    Ray counts if it is initialised or `RAY_ADDRESS` is set, Spark if this process has a session, whichever thread has made
    it. What the process has itself made comes before what its environment says.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return "ray"
    if _has_spark_session():
        return "spark"
    return "ray" if environ.get("RAY_ADDRESS") else None


def _has_spark_session() -> bool:
    """Whether this process has one. Those of Spark Connect, which will be refused, belong to a thread."""
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    if context is not None and context._active_spark_context is not None:
        return True
    sql = sys.modules.get("pyspark.sql")
    return sql is not None and sql.SparkSession.getActiveSession() is not None
