"""Places for workers in a Ray cluster: a placement group, and in it an actor for each rank, which runs the agent.

    RayPlacement(num_gpus=1, accelerator_type="V100", strategy="STRICT_SPREAD")

Ray Core places and ends processes and says which it has lost; all else goes over our own connections (`crew.py`). The
group is reserved whole or not at all. Actors are asked for at once, and come to life when it is.

A group that the nodes can't hold is refused at the start, with what is there. One that is only waiting, for a busy cluster
or, after a node was lost, for another node, has `wait_s`; then it is a failure of the host.

Which cluster that is, `ray_session.py` finds out.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import time
from collections.abc import Mapping
from typing import Any, Literal

from footplate.core.errors import ConfigError, LaunchError
from footplate.launch.cluster import ray_session
from footplate.launch.cluster.agent import AgentCall
from footplate.launch.cluster.placement import Lost
from footplate.launch.local import Caller

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
WAIT_S = 60.0
KILL_S = 5.0


class RayPlacement:
    """A `Placement` in a Ray cluster, to which this connects.

    Args:
        address: of the cluster's head, such as "10.0.0.1:6379"; None to find it (`ray_session.py`).
        num_cpus: processor cores that Ray reserves for a worker.
        num_gpus: whole GPUs for a worker.
        accelerator_type: the kind of accelerator that its node must have, in Ray's words, such as "V100".
        resources: of your cluster's own kinds, for a worker.
        strategy: whether workers should be on few nodes ("PACK"), on many ("SPREAD"), or must be on one or each on another.
        wait_s: how long to wait for room; None for 60 s where the nodes could hold the workers if they were idle.
        runtime_env: Ray's description of what the processes on the nodes need.

    Raises:
        ConfigError: an argument that can't be.
        LaunchError: no cluster is there, or it can't be used from here.
        MissingExtra: Ray is not installed.
    """

    name = "ray"

    def __init__(
        self,
        address: str | None = None,
        num_cpus: float = 1,
        num_gpus: int = 0,
        accelerator_type: str | None = None,
        resources: Mapping[str, float] | None = None,
        strategy: Strategy = "PACK",
        wait_s: float | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ConfigError(f"strategy={strategy!r}: expected one of {', '.join(STRATEGIES)}.")
        if num_gpus != int(num_gpus):
            raise ConfigError(f"num_gpus={num_gpus}: a worker has whole GPUs, as its local rank chooses one of them.")
        self._needs = _needs(num_cpus, int(num_gpus), accelerator_type, resources or {})
        self._strategy = strategy
        self._wait_s = wait_s
        self._runtime_env = dict(runtime_env or {})
        self._ray, self.host = ray_session.connect(address)
        self._group: Any = None
        self._actors: list[Any] = []
        self._held: dict[Any, int] = {}  # what each actor's call will have returned: its index
        self._wait_until = math.inf
        self._placed_before = False

    def slots(self) -> int:
        """How many workers the nodes could hold if they were idle."""
        rooms = [room(node["Resources"], self._needs) for node in self._nodes()]
        if self._strategy == "STRICT_SPREAD":
            return sum(one > 0 for one in rooms)
        return max(rooms, default=0) if self._strategy == "STRICT_PACK" else sum(rooms)

    def start(self, count: int, call: AgentCall) -> None:
        if count > self.slots() and self._wait_s is None and not self._placed_before:
            raise LaunchError(f"{self._cannot_hold(count)} Use fewer or smaller workers, or add nodes.")
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._wait_until = time.monotonic() + (WAIT_S if self._wait_s is None else self._wait_s)
        self._group = placement_group([dict(self._needs) for _ in range(count)], self._strategy)
        options = {
            "num_cpus": self._needs.get("CPU", 0),
            "num_gpus": self._needs.get("GPU", 0),
            "resources": {name: amount for name, amount in self._needs.items() if name not in ("CPU", "GPU")},
            "max_restarts": 0,
            "runtime_env": self._runtime_env or None,
        }
        place = self._ray.remote(_place_class())
        path, pickled = Caller.here().path, pickle.dumps(call)
        for index in range(count):
            there = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            actor = place.options(scheduling_strategy=there, **options).remote()
            self._actors.append(actor)
            self._held[actor.hold.remote(path, pickled, index)] = index

    def lost(self) -> list[Lost]:
        if self._group is not None and self._wait_until < math.inf:
            late = self._late()
            if late is not None:
                return [late]
        gone, _ = self._ray.wait(list(self._held), num_returns=len(self._held), timeout=0) if self._held else ([], [])
        return [Lost(self._held.pop(one), self._how(one)) for one in gone]

    def close(self) -> None:
        if self._group is None:
            return
        with contextlib.suppress(Exception):  # a cluster that is no more has nothing of ours
            for actor in self._actors:
                self._ray.kill(actor)
            if self._held:
                self._ray.wait(list(self._held), num_returns=len(self._held), timeout=KILL_S, fetch_local=False)
            self._ray.util.remove_placement_group(self._group)
        self._group, self._actors, self._held = None, [], {}

    def _late(self) -> Lost | None:
        """Whether the group has had to wait for too long; a place that stands for all, as it came to none."""
        if self._ray.util.placement_group_table(self._group)["state"] == "CREATED":
            self._wait_until, self._placed_before = math.inf, True
            return None
        if time.monotonic() < self._wait_until:
            return None
        self._wait_until = math.inf
        count = len(self._actors)
        if count > self.slots():
            why = self._cannot_hold(count)
        else:
            free = self._ray.available_resources()
            amounts = ", ".join(f"{name} {free.get(name, 0):g}" for name in self._needs)
            why = f"Others use what {count} worker(s) of {_words(self._needs)} need; free are {amounts}."
        if not self._placed_before:
            raise LaunchError(f"Ray found no room in time. {why} Wait until there is, or give more time with wait_s.")
        return Lost(0, f"Ray found no room in time. {why}")

    def _cannot_hold(self, count: int) -> str:
        slots, nodes = self.slots(), self._nodes()
        there = "; ".join(f"{node['NodeManagerAddress']} ({_words(node['Resources'], self._needs)})" for node in nodes)
        return (
            f"{count} worker(s) of {_words(self._needs)}, placed {self._strategy}: the Ray cluster can hold {slots}, "
            f"{count - slots} too few. Its nodes: {there or 'none'}."
        )

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _how(self, held: Any) -> str:
        """How an actor's call came to its end, in one line."""
        try:
            self._ray.get(held)
        except self._ray.exceptions.RayTaskError as error:
            return " ".join(str(error.cause or error).split())
        except Exception as error:
            return " ".join(str(error).split())[:300]
        return "its agent ended"


def room(has: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """How often a node that has so much holds what a worker needs.

    >>> room({"CPU": 4.0, "GPU": 1.0}, {"CPU": 1, "GPU": 1})
    1
    """
    return min((math.floor(has.get(name, 0.0) / amount + 1e-6) for name, amount in needs.items()), default=0)


def _needs(num_cpus: float, num_gpus: int, accelerator_type: str | None, own: Mapping[str, float]) -> dict[str, float]:
    """What Ray is to reserve for a worker."""
    kind = {f"accelerator_type:{accelerator_type}": 0.001} if accelerator_type else {}
    needs = {"CPU": num_cpus, "GPU": num_gpus, **kind, **own}
    if any(amount < 0 for amount in needs.values()):
        raise ConfigError(f"A worker can't need {_words(needs)}: expected amounts of 0 or more.")
    needs = {name: amount for name, amount in needs.items() if amount}
    if not needs:
        raise ConfigError("num_cpus=0 and nothing else: a worker must need something, or Ray can't count how many fit.")
    return needs


def _words(amounts: Mapping[str, float], names: Mapping[str, float] | None = None) -> str:
    return ", ".join(f"{name} {amounts.get(name, 0):g}" for name in names or amounts)


def _place_class() -> type:
    """The actor. Being local to a function, it is pickled whole: what a node can import is settled when it has our path."""

    class FootplatePlace:
        def hold(self, path: list[str], call: bytes, index: int) -> None:
            import pickle
            import sys

            import ray

            sys.path += [entry for entry in path if entry not in sys.path]
            pickle.loads(call)(index, ray.get_runtime_context().get_node_id())

    return FootplatePlace
