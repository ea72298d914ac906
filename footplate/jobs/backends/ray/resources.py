"""What the replicas of a job ask of a Ray cluster, and whether its nodes could hold them: pure functions.

**Accelerators** are asked for as the spec declares them, kind and count: a job whose cluster has none waits until there
are some, as a cluster may be made larger, by people or by Ray's autoscaler.

**Cores** are asked for as declared as far as the nodes have them: no replica asks for more than the largest node has, and
if all of them together were more than the cluster has when it is idle, each asks for a half of it, a quarter, and so on.
So what was written for machines of another size runs on a laptop, too.

**Memory** isn't asked for. What Ray counts as a node's is about two thirds of it, so that no machine would hold what its
own type declares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from footplate.jobs.translate.ray import KINDS, SHARE

Bundle = dict[str, float]
Nodes = Mapping[str, Mapping[str, float]]
"""What the nodes of a cluster have, in Ray's words, by their addresses."""

_SMALLEST = 2.0**-6  # of the cores that were declared


@dataclass(frozen=True)
class Need:
    """What each replica of a role is to have.

    Attributes:
        role: one of `spec.scaling.ROLES`.
        count: how many replicas.
        cpus: cores.
        gpus: accelerators.
        kind: their kind, as Ray calls it; None where there are none.
    """

    role: str
    count: int
    cpus: float
    gpus: int = 0
    kind: str | None = None

    def bundle(self, most: float = float("inf"), share: float = 1.0) -> Bundle:
        """What one of them asks of Ray.

        Args:
            most: cores that the largest node has.
            share: of its cores that it asks for.
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
    """Of the replicas of a resolved job, as `ResolvedJob.to_dict` has them."""
    found = []
    for one in replicas:
        accelerator = one.get("accelerator") or {}
        kind = KINDS.get(accelerator.get("type", ""))
        found.append(
            Need(one["role"], one["count"], one.get("vcpus") or 1.0, accelerator.get("count", 0) if kind else 0, kind)
        )
    return tuple(found)


def bundles(wanted: Sequence[Need], nodes: Nodes) -> list[Bundle]:
    """What each replica asks for, in the order of the roles. See the module's docstring."""
    most = max((has.get("CPU", 0.0) for has in nodes.values()), default=0.0) or float("inf")
    share = 1.0
    while share >= _SMALLEST:
        asked = [bundle for one in wanted for bundle in [one.bundle(most, share)] * one.count]
        if holds(nodes, asked):
            return asked
        share /= 2
    return [bundle for one in wanted for bundle in [one.bundle(most)] * one.count]


def holds(nodes: Nodes, asked: Sequence[Bundle]) -> bool:
    """Whether the nodes, if they were idle, could hold all of these at once; the largest are placed first."""
    left = [dict(has) for has in nodes.values()]
    for bundle in sorted(asked, key=lambda one: (-one.get("GPU", 0), -one["CPU"])):
        for has in left:
            if all(has.get(name, 0.0) >= amount - 1e-9 for name, amount in bundle.items()):
                for name, amount in bundle.items():
                    has[name] -= amount
                break
        else:
            return False
    return True


def shortages(wanted: Sequence[Need], nodes: Nodes) -> Iterator[str]:
    """What the cluster has less of than the spec declares, and what follows; each a sentence."""
    for one in wanted:
        if one.gpus and not holds(nodes, [one.bundle(share=0.0)]):
            yield (
                f"No node of the Ray cluster has {one.gpus} {one.kind} for {one}. The job waits until there is one. "
                f"It has {words(nodes)}."
            )
    whole = [bundle for one in wanted for bundle in [one.bundle()] * one.count]
    asked = bundles(wanted, nodes)
    if asked != whole:
        declared, given = (sum(bundle["CPU"] for bundle in some) for some in (whole, asked))
        yield (
            f"The spec declares {declared:g} CPU, and the Ray cluster has {words(nodes)}. The job takes {given:g} CPU."
        )


def waiting(wanted: Sequence[Need], nodes: Nodes, free: Mapping[str, float]) -> str:
    """Why a job doesn't begin yet.

    Args:
        wanted: what its replicas are to have.
        nodes: of the cluster.
        free: what nobody uses now, of the whole cluster.
    """
    for one in wanted:
        if one.gpus and not holds(nodes, [one.bundle(share=0.0)]):
            return f"waits for a node with {one.gpus} {one.kind}; the Ray cluster has {words(nodes)}"
    asked = bundles(wanted, nodes)
    if not holds(nodes, asked):
        listed = ", ".join(map(str, wanted))
        return f"waits for more nodes: it needs {listed}; the Ray cluster has {words(nodes)}"
    total: Bundle = {}
    for bundle in asked:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    parts = [f"{total[name]:g} {name} ({free.get(name, 0.0):g} free)" for name in ("CPU", "GPU") if total.get(name)]
    return f"waits for what others use of the Ray cluster: it needs {', '.join(parts)}"


def words(nodes: Nodes) -> str:
    """What the nodes have, in words.

    >>> words({"10.0.0.1": {"CPU": 4.0}, "10.0.0.2": {"CPU": 16.0, "GPU": 4.0, "accelerator_type:T4": 1.0}})
    'a node of 4 CPU; a node of 16 CPU, 4 T4'
    """
    kinds: dict[str, int] = {}
    for has in nodes.values():
        what = [f"{has.get('CPU', 0.0):g} CPU"]
        if has.get("GPU"):
            kind = next((name.partition(":")[2] for name in has if name.startswith("accelerator_type:")), "GPU")
            what.append(f"{has['GPU']:g} {kind}")
        kinds[", ".join(what)] = kinds.get(", ".join(what), 0) + 1
    return (
        "; ".join(f"{'a node' if count == 1 else f'{count} nodes'} of {what}" for what, count in kinds.items())
        or "no node"
    )
