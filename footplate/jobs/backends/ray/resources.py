"""The resources that replicas request from a Ray cluster, and if its nodes can provide them: pure functions.

**Accelerators** are requested as the spec declares them, kind and count. On a cluster without them the job waits until
there are some, since people or Ray's autoscaler may enlarge the cluster.

**Cores** are requested as declared, as far as the nodes have them. No replica requests more than the largest node has. If
all replicas together request more than the idle cluster has, each requests a half, a quarter, and so on. So a spec for
machines of another size also runs on a laptop.

**Memory** isn't requested. Ray counts about two thirds of a node's memory, so no machine could provide what its own type
declares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from footplate.jobs.translate.ray import KINDS, SHARE

Bundle = dict[str, float]
Nodes = Mapping[str, Mapping[str, float]]
"""The resources of a cluster's nodes, in Ray's terms, by their ids."""

# The smallest share of the declared cores.
_SMALLEST = 2.0**-6


@dataclass(frozen=True)
class Need:
    """The resources of each replica of a role.

    Attributes:
        role: one of `spec.scaling.ROLES`.
        count: the number of replicas.
        cpus: cores.
        gpus: accelerators.
        kind: their kind, in Ray's terms; None without accelerators.
    """

    role: str
    count: int
    cpus: float
    gpus: int = 0
    kind: str | None = None

    def bundle(self, most: float = float("inf"), share: float = 1.0) -> Bundle:
        """The resources that one replica requests from Ray.

        Args:
            most: the cores of the largest node.
            share: the share of its cores to request.
        """
        asked: Bundle = {"CPU": max(0.01, round(min(self.cpus, most) * share, 2))}
        if self.gpus:
            asked |= {"GPU": self.gpus, f"accelerator_type:{self.kind}": SHARE}
        return asked

    def __str__(self) -> str:
        machine = f"{self.cpus:g} CPU" + (f" and {self.gpus} {self.kind}" if self.gpus else "")
        role = self.role.replace("_", " ")
        return f"a {role} of {machine}" if self.count == 1 else f"{self.count} {role}s of {machine} each"


def needs(replicas: Sequence[Mapping[str, Any]]) -> tuple[Need, ...]:
    """The needs of a resolved job's replicas, given as in `ResolvedJob.to_dict`."""
    wanted = []
    for replica in replicas:
        accelerator = replica.get("accelerator") or {}
        kind = KINDS.get(accelerator.get("type", ""))
        wanted.append(
            Need(
                replica["role"],
                replica["count"],
                replica.get("vcpus") or 1.0,
                accelerator.get("count", 0) if kind else 0,
                kind,
            )
        )
    return tuple(wanted)


def bundles(wanted: Sequence[Need], nodes: Nodes) -> list[Bundle]:
    """The resources that each replica requests, in the order of the roles. See the module's docstring."""
    most = max((has.get("CPU", 0.0) for has in nodes.values()), default=0.0) or float("inf")
    share = 1.0
    while share >= _SMALLEST:
        asked = [bundle for need in wanted for bundle in [need.bundle(most, share)] * need.count]
        if holds(nodes, asked):
            return asked
        share /= 2
    return [bundle for need in wanted for bundle in [need.bundle(most)] * need.count]


def holds(nodes: Nodes, asked: Sequence[Bundle]) -> bool:
    """Return True if the idle nodes could hold all of these at once. The largest are placed first."""
    left = [dict(has) for has in nodes.values()]
    for bundle in sorted(asked, key=lambda bundle: (-bundle.get("GPU", 0), -bundle["CPU"])):
        for has in left:
            if all(has.get(name, 0.0) >= amount - 1e-9 for name, amount in bundle.items()):
                for name, amount in bundle.items():
                    has[name] -= amount
                break
        else:
            return False
    return True


def shortages(wanted: Sequence[Need], nodes: Nodes) -> Iterator[str]:
    """Explain what the cluster lacks compared with the spec, and the consequence; one sentence each."""
    for need in wanted:
        if need.gpus and not holds(nodes, [need.bundle(share=0.0)]):
            yield (
                f"No node of the Ray cluster has {need.gpus} {need.kind} for {need}. The job waits until there is one. "
                f"It has {words(nodes)}."
            )
    whole = [bundle for need in wanted for bundle in [need.bundle()] * need.count]
    asked = bundles(wanted, nodes)
    if asked != whole:
        declared, taken = (sum(bundle["CPU"] for bundle in some) for some in (whole, asked))
        yield (
            f"The spec declares {declared:g} CPU, and the Ray cluster has {words(nodes)}. The job takes {taken:g} CPU."
        )


def waiting(wanted: Sequence[Need], nodes: Nodes, free: Mapping[str, float]) -> str:
    """Explain why a job doesn't begin yet.

    Args:
        wanted: the needs of its replicas.
        nodes: the cluster's nodes.
        free: the free resources of the whole cluster.
    """
    for need in wanted:
        if need.gpus and not holds(nodes, [need.bundle(share=0.0)]):
            return f"waits for a node with {need.gpus} {need.kind}; the Ray cluster has {words(nodes)}"
    asked = bundles(wanted, nodes)
    if not holds(nodes, asked):
        listed = ", ".join(map(str, wanted))
        return f"waits for more nodes: it needs {listed}; the Ray cluster has {words(nodes)}"
    total: Bundle = {}
    for bundle in asked:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    parts = [f"{total[name]:g} {name} ({free.get(name, 0.0):g} free)" for name in ("CPU", "GPU") if total.get(name)]
    return f"waits for resources that others use on the Ray cluster: it needs {', '.join(parts)}"


def words(nodes: Nodes) -> str:
    """Describe the nodes' resources in words.

    >>> words({"10.0.0.1": {"CPU": 4.0}, "10.0.0.2": {"CPU": 16.0, "GPU": 4.0, "accelerator_type:T4": 1.0}})
    'a node of 4 CPU; a node of 16 CPU, 4 T4'
    """
    kinds: dict[str, int] = {}
    for has in nodes.values():
        parts = [f"{has.get('CPU', 0.0):g} CPU"]
        if has.get("GPU"):
            kind = next((name.partition(":")[2] for name in has if name.startswith("accelerator_type:")), "GPU")
            parts.append(f"{has['GPU']:g} {kind}")
        kinds[", ".join(parts)] = kinds.get(", ".join(parts), 0) + 1
    return (
        "; ".join(
            f"{'a node' if count == 1 else f'{count} nodes'} of {description}" for description, count in kinds.items()
        )
        or "no node"
    )
