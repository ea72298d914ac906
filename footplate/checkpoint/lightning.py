"""A checkpoint that Lightning wrote, as a run state that training can be continued from.

Lightning's file has most of what ours has, under names that ours took over: weights, hyper-parameters, the states of
optimizers, schedulers and callbacks. How far the run was stands in its loops' counters:

    loops.fit_loop.epoch_loop.batch_progress    batches of the epoch, and of the run; whether that was the epoch's last
    loops.fit_loop.epoch_progress               epochs that have begun, and that are done

What it lacks: the order of the data and the states of random generators (both are then ours, from the trainer's seed),
metrics that an unfinished epoch has collected, gradients of an unfinished accumulation window. Lightning is not imported.
"""

from __future__ import annotations

import ast
import re
from dataclasses import asdict
from typing import Any

import torch

from footplate.checkpoint.run_state import FORMAT, Progress
from footplate.core.version import __version__

_OURS = ("loops", "precision_plugin", "MixedPrecision", "native_amp_scaling_state")


def is_lightnings(state: dict[str, Any]) -> bool:
    """Whether a state was written by Lightning, rather than under its names."""
    return "pytorch-lightning_version" in state and "footplate" not in state


def translate(state: dict[str, Any]) -> dict[str, Any]:
    """Lightning's state under our names. What it has beyond them is kept, for hooks that look for it.

    Without loops, optimizers or schedulers in it, it is one of weights only.
    """
    result = {name: value for name, value in state.items() if name not in _OURS}
    result |= {
        "footplate": {"format": FORMAT, "footplate": __version__, "torch": str(torch.__version__)},
        "made_by": f"Lightning {state['pytorch-lightning_version']}",
        "epoch": state.get("epoch", 0),
        "global_step": state.get("global_step", 0),
    }
    loop = state.get("loops", {}).get("fit_loop")
    if loop is None or "optimizer_states" not in state:
        return result
    progress = _progress(loop, state["epoch"], state["global_step"])
    scaler = state.get("MixedPrecision") or state.get("native_amp_scaling_state")
    callbacks = state.get("callbacks", {})
    result |= {
        "progress": asdict(progress),
        "callbacks": {**callbacks, **dict(_early_stopping(key, value) for key, value in callbacks.items())},
        "step": {"scaler": scaler} if scaler else {},
    }
    if progress.batch_idx and not progress.epoch_ended:
        own = loop.get("state_dict", {}).get("combined_loader") or []
        result["position"] = {"epoch": progress.epoch, "batch": progress.batch_idx, **({"own": own[0]} if own else {})}
    return result


def _progress(loop: dict[str, Any], epoch: int, global_step: int) -> Progress:
    """How far the run was.

    A save in `on_train_batch_end` comes when the batch is processed but not yet completed, one after validation when it is
    both. With the last batch the epoch's schedulers have been stepped, so that nothing of the epoch is left to do.
    """
    batches = loop["epoch_loop.batch_progress"]
    epochs = loop["epoch_progress"]["current"]
    progress = Progress(epoch=epoch, batches=batches["total"]["processed"], global_step=global_step)
    if epochs["completed"] >= epochs["ready"]:  # saved after fit(), or before it: between two epochs
        progress.epoch = epochs["completed"]
        return progress
    progress.batch_idx = batches["current"]["processed"]
    progress.epoch_ended = bool(batches["is_last_batch"])
    if batches["current"]["completed"] == progress.batch_idx:
        progress.validated_at = progress.batches
    return progress


def _early_stopping(key: str, state: Any) -> tuple[str, Any]:
    """The state of Lightning's EarlyStopping under the key of ours; any other as it is."""
    found = re.fullmatch(r"EarlyStopping(\{.*\})", key)
    if found is None:
        return key, state
    settings = ast.literal_eval(found.group(1))
    return f"EarlyStopping[{settings['monitor']},{settings['mode']}]", {
        "wait_count": state["wait_count"],
        "stopped_epoch": state["stopped_epoch"],
        "best_score": float(state["best_score"]),
    }
