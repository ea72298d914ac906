"""The parts of a checkpoint that differ between ranks, and how another number of ranks continues from them.

Rank 0 writes a checkpoint, which holds the model once. `ranks` has a part for each rank: the gradients of an unfinished
accumulation window, running metrics, the loader's position, the states of the global generators. With the same number of
ranks, each takes its own part. With another number, totals are kept:

    gradients    every rank takes the average of the parts, so the average over the new ranks is the same; of gradients of
                 sums of losses, and of their weight, each rank takes an equal share of the total
    metrics      merged, and so are the states of torchmetrics objects; rank 0 takes them, the other ranks start empty
    loader       the position in global batches, which is the same for all
    generators   rank r takes those of rank r; a new rank gets a new seed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from footplate.core import rng
from footplate.distributed.metric_reduction import merge_metric, merge_states
from footplate.distributed.world import World

REQUIRED = ("step", "metrics", "loader", "rng")
OWN = (*REQUIRED, "torchmetrics")


def part_of(state: dict[str, Any], world: World, reductions: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """The run state for this rank.

    Args:
        state: a whole checkpoint.
        world: this process's ranks.
        reductions: see `merge_states`.
    """
    # The file has only weights, or another program wrote it.
    if not all(name in state for name in REQUIRED):
        return state
    parts = state.get("ranks") or [{name: state[name] for name in OWN if name in state}]
    if len(parts) == world.size:
        return {**state, **parts[world.rank]}
    seed = rng.mix(state["seed"], state["progress"]["batches"], world.rank)
    return {
        **state,
        "step": _share_out_gradients([part.get("step", state["step"]) for part in parts], world.size),
        "metrics": merge_states([part["metrics"] for part in parts], reductions) if world.rank == 0 else {},
        "torchmetrics": _merged([part.get("torchmetrics", {}) for part in parts], reductions)
        if world.rank == 0
        else {},
        "loader": parts[world.rank % len(parts)]["loader"],
        "rng": parts[world.rank]["rng"] if world.rank < len(parts) else _fresh_generators(seed),
    }


def _merged(ranks: Sequence[dict[str, Any]], reductions: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of torchmetrics objects on several ranks into those of one, by path."""
    paths = dict.fromkeys(path for states in ranks for path in states)
    return {
        path: merge_metric([states[path] for states in ranks if path in states], reductions(path)) for path in paths
    }


def _share_out_gradients(steps: Sequence[dict[str, Any]], ranks: int) -> dict[str, Any]:
    if not any("gradients" in step for step in steps):
        return steps[0]
    sums = any("weight" in step for step in steps)
    divisor = ranks if sums else len(steps)
    totals: dict[str, torch.Tensor] = {}
    for step in steps:
        for name, gradient in step.get("gradients", {}).items():
            totals[name] = totals[name] + gradient if name in totals else gradient
    shared = {**steps[0], "gradients": {name: gradient / divisor for name, gradient in totals.items()}}
    shared["counts"] = any(step.get("counts", True) for step in steps if "gradients" in step)
    if sums:
        shared["weight"] = sum(step["weight"] for step in steps if "weight" in step) / divisor
    return shared


def _fresh_generators(seed: int) -> dict[str, Any]:
    before = rng.capture()
    rng.seed_globals(seed)
    try:
        return rng.capture()
    finally:
        rng.restore(before)
