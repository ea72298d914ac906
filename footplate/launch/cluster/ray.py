"""Agents in a Ray cluster: a placement group, and in it an actor for each rank, which runs the agent.

    RayPlacement(num_gpus=1, accelerator_type="V100", strategy="STRICT_SPREAD")

Ray Core places and ends processes, and reports those that it has lost. Everything else goes over our own connections
(`agent_group.py`). Ray reserves the group whole or not at all. The actors are requested at once, and start when it is
reserved.

A group that the nodes could never hold is refused at the start, with a list of the nodes. A group may also have to wait:
for a busy cluster or, after a node was lost, for another node. It has `wait_s` for that; then it is a failure of the host.

When Ray drains one of the group's nodes (`ray_draining.py`), the ranks save and end, and the group is placed again.

`ray_session.py` finds the cluster.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from footplate.core.errors import ConfigError, LaunchError
from footplate.launch.cluster import ray_draining, ray_session
from footplate.launch.cluster.agent import AgentCall
from footplate.launch.cluster.placement import CountedSlots, Lost
from footplate.launch.cluster.ray_draining import DrainWatch
from footplate.launch.local import Caller

log = logging.getLogger(__name__)

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
WAIT_S = 60.0
# The same after a loss, if fewer workers are enough. Ray may take longer to notice that a node is gone.
REPLACE_ONE_S = 10.0
KILL_S = 5.0
# Time for a lost head to come back. Ray ends this process after a minute.
HEAD_S = 30.0


class RayPlacement(CountedSlots):
    """A `Placement` in a Ray cluster. It connects to the cluster.

    Args:
        address: of the cluster's head, such as "10.0.0.1:6379"; None to find it (`ray_session.py`).
        num_cpus: processor cores that Ray reserves for a worker.
        num_gpus: GPUs for a worker, a whole number.
        accelerator_type: the accelerator that its node must have, by Ray's name, such as "V100".
        resources: custom resources of your cluster, for a worker.
        strategy: workers should be on few nodes ("PACK") or on many ("SPREAD"), or must be on one node ("STRICT_PACK") or
            each on a node of its own ("STRICT_SPREAD").
        wait_s: how long to wait for free resources. None for 60 s; workers that the nodes could never hold are then refused
            at once.
        runtime_env: Ray's runtime environment for the processes on the nodes.
        min_workers: the fewest workers that are enough. The launch then goes on without a lost node, and with it when it is
            back. None to wait for all.

    Raises:
        ConfigError: an argument is invalid.
        LaunchError: there is no cluster, or this process can't use it.
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
        min_workers: int | None = None,
    ) -> None:
        self.min_workers = min_workers
        if strategy not in STRATEGIES:
            raise ConfigError(f"strategy={strategy!r}: expected one of {', '.join(STRATEGIES)}.")
        if num_gpus != int(num_gpus):
            raise ConfigError(
                f"num_gpus={num_gpus}: a worker has whole GPUs, as its local rank chooses one of them. Use a whole number."
            )
        self._needs = _needs(num_cpus, int(num_gpus), accelerator_type, resources or {})
        self._strategy = strategy
        self._wait_s = wait_s
        self._runtime_env = dict(runtime_env or {})
        self._ray, self.host = ray_session.connect(address)
        self._group: Any = None
        self._watch: DrainWatch | None = None
        self._actors: list[Any] = []
        # The index of each actor, by the future of its call.
        self._calls: dict[Any, int] = {}
        self._wait_until = math.inf
        self._placed_before = False

    def slots(self, wanted: int = 0) -> int:
        """The number of workers that the nodes could hold when idle."""
        return self._together([slots_of(node["Resources"], self._needs) for node in self._nodes()])

    def room(self) -> int:
        """The number of workers for which nodes have free resources, with those of the present group."""
        if ray_session.wait_for_head(self._ray, 0):
            # Ray's calls would wait. The next `start` says what is wrong.
            return len(self._actors)
        nodes = {node["NodeID"] for node in self._nodes()} - ray_draining.nodes(self._ray).keys()
        free = self._ray._private.state.available_resources_per_node()
        ours = Counter(ray_draining.nodes_of(self._ray, self._group) if self._group is not None else [])
        return self._together([slots_of(free.get(node, {}), self._needs) + ours[node] for node in nodes])

    def _together(self, slots: Sequence[int]) -> int:
        """The number of workers that the strategy can place, given the slots of each node."""
        if self._strategy == "STRICT_SPREAD":
            return sum(count > 0 for count in slots)
        return max(slots, default=0) if self._strategy == "STRICT_PACK" else sum(slots)

    def leaving(self) -> bool:
        return self._watch is not None and self._watch.draining

    def start(self, slots: Sequence[int], call: AgentCall) -> None:
        count = len(slots)
        if self._placed_before and (problem := ray_session.wait_for_head(self._ray, HEAD_S)):
            ray_session.report_errors_without_ray()
            raise LaunchError(
                f"{problem}. Without it, Ray can't place workers again. Start the cluster again, and then this program."
            )
        if count > self.slots() and self._wait_s is None and not self._placed_before:
            raise LaunchError(f"{self._cannot_hold(count)} Use fewer or smaller workers, or add nodes.")
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        replaced_s = REPLACE_ONE_S if self.min_workers is not None and self._placed_before else WAIT_S
        self._wait_until = time.monotonic() + (replaced_s if self._wait_s is None else self._wait_s)
        self._group = placement_group([dict(self._needs) for _ in range(count)], self._strategy)
        options = {
            "num_cpus": self._needs.get("CPU", 0),
            "num_gpus": self._needs.get("GPU", 0),
            "resources": {name: amount for name, amount in self._needs.items() if name not in ("CPU", "GPU")},
            "max_restarts": 0,
            "runtime_env": self._runtime_env or None,
        }
        actor_class = self._ray.remote(_actor_class())
        path, pickled = Caller.of_this_process().path, pickle.dumps(call)
        for index in range(count):
            bundle = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            actor = actor_class.options(scheduling_strategy=bundle, **options).remote()
            self._actors.append(actor)
            self._calls[actor.run.remote(path, pickled, index)] = index
        self._watch = DrainWatch(self._ray, self._group)

    def lost(self) -> list[Lost]:
        if self._group is not None and self._wait_until < math.inf:
            late = self._late()
            if late is not None:
                return [late]
        if not self._calls:
            return []
        ended, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        return [Lost(self._calls.pop(future), self._how_it_ended(future)) for future in ended]

    def close(self) -> None:
        if self._group is None:
            return
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if problem := ray_session.wait_for_head(self._ray, 0):
            # The agents have ended by themselves, since their connections have.
            log.warning("%s. Its placement group is left to it", problem)
            self._group, self._actors, self._calls = None, [], {}
            return
        # If the cluster is gone, our actors are gone with it.
        with contextlib.suppress(Exception):
            for actor in self._actors:
                self._ray.kill(actor)
            if self._calls:
                self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=KILL_S, fetch_local=False)
            self._ray.util.remove_placement_group(self._group)
        self._group, self._actors, self._calls = None, [], {}

    def _late(self) -> Lost | None:
        """Return a loss if the placement group has waited for too long. It stands for all ranks, as none was placed."""
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
            why = f"{count} worker(s) of {_words(self._needs)} need more than is free now: {amounts}."
        if not self._placed_before:
            raise LaunchError(f"Ray had no free resources in time. {why} Try later, or wait longer with wait_s.")
        return Lost(0, f"Ray had no free resources in time. {why}")

    def _cannot_hold(self, count: int) -> str:
        slots, nodes = self.slots(), self._nodes()
        listed = "; ".join(f"{node['NodeManagerAddress']} ({_words(node['Resources'], self._needs)})" for node in nodes)
        return (
            f"{count} worker(s) of {_words(self._needs)}, placed {self._strategy}: the Ray cluster can hold {slots}, "
            f"{count - slots} too few. Its nodes: {listed or 'none'}."
        )

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _how_it_ended(self, future: Any) -> str:
        """Describe the end of an actor's call, in one line."""
        try:
            self._ray.get(future)
        except self._ray.exceptions.RayTaskError as error:
            return " ".join(str(error.cause or error).split())
        except Exception as error:
            return " ".join(str(error).split())[:300]
        return "its agent ended"


def slots_of(has: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """The number of workers that a node can hold, given its resources and the needs of a worker.

    >>> slots_of({"CPU": 4.0, "GPU": 1.0}, {"CPU": 1, "GPU": 1})
    1
    """
    return min((math.floor(has.get(name, 0.0) / amount + 1e-6) for name, amount in needs.items()), default=0)


def _needs(num_cpus: float, num_gpus: int, accelerator_type: str | None, own: Mapping[str, float]) -> dict[str, float]:
    """The resources that Ray reserves for a worker."""
    kind = {f"accelerator_type:{accelerator_type}": 0.001} if accelerator_type else {}
    needs = {"CPU": num_cpus, "GPU": num_gpus, **kind, **own}
    if any(amount < 0 for amount in needs.values()):
        raise ConfigError(f"A worker can't need {_words(needs)}: expected amounts of 0 or more.")
    needs = {name: amount for name, amount in needs.items() if amount}
    if not needs:
        raise ConfigError(
            "num_cpus=0 and no other resource: Ray can't count how many workers fit. Give a worker at least one resource."
        )
    return needs


def _words(amounts: Mapping[str, float], names: Mapping[str, float] | None = None) -> str:
    return ", ".join(f"{name} {amounts.get(name, 0):g}" for name in names or amounts)


def _actor_class() -> type:
    """Make the actor class.

    A class inside a function is pickled by value. So a node imports nothing of ours before `run` has set its path.
    """

    class FootplateAgent:
        def run(self, path: list[str], call: bytes, index: int) -> None:
            import pickle
            import sys

            import ray

            sys.path += [entry for entry in path if entry not in sys.path]
            pickle.loads(call)(index, ray.get_runtime_context().get_node_id())

    return FootplateAgent
