"""Checkpoints that Lightning wrote, as run states that training can continue from.

`footplate/__init__.py` registers `LIGHTNING` by name, and it is imported when it is needed. Lightning is not imported.

A Lightning file has weights, hyper-parameters, and the states of optimizers, schedulers and callbacks under the names that
Footplate uses too. The progress of the run is in the counters of Lightning's loops:

    loops.fit_loop.epoch_loop.batch_progress    batches of the epoch and of the run, and if the last one ended the epoch
    loops.fit_loop.epoch_progress               epochs that have begun, and epochs that are complete

A Lightning file lacks the order of the data and the states of random generators: Footplate derives both from the trainer's
seed. It also lacks the metrics that an unfinished epoch has collected, and the gradients of an unfinished accumulation
window.
"""

from __future__ import annotations

import ast
import re
from dataclasses import asdict
from typing import Any

import torch

from footplate.checkpoint.run_state import FORMAT, Progress
from footplate.core.foreign_checkpoints import ForeignFormat
from footplate.core.version import __version__

# Keys whose content a run state has under other names.
_TRANSLATED = ("loops", "precision_plugin", "MixedPrecision", "native_amp_scaling_state")


def is_lightnings(state: dict[str, Any]) -> bool:
    """Return True if Lightning itself wrote a state. Footplate's states use Lightning's names, too."""
    return "pytorch-lightning_version" in state and "footplate" not in state


def translate(state: dict[str, Any]) -> dict[str, Any]:
    """Translate Lightning's state into a run state. Additional entries are kept, for hooks that read them.

    A state without loops, optimizers or schedulers becomes a state of weights only.
    """
    result = {name: value for name, value in state.items() if name not in _TRANSLATED}
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
    """The progress of the run.

    Lightning saves in `on_train_batch_end` when the batch is processed but not yet completed, and after validation when it
    is both. After the last batch of an epoch, the schedulers have been stepped and nothing of the epoch is left to do.
    """
    batches = loop["epoch_loop.batch_progress"]
    epochs = loop["epoch_progress"]["current"]
    progress = Progress(epoch=epoch, batches=batches["total"]["processed"], global_step=global_step)

    # Saved before or after fit(): between two epochs.
    if epochs["completed"] >= epochs["ready"]:
        progress.epoch = epochs["completed"]
        return progress

    progress.batch_idx = batches["current"]["processed"]
    progress.epoch_ended = bool(batches["is_last_batch"])
    if batches["current"]["completed"] == progress.batch_idx:
        progress.validated_at = progress.batches
    return progress


def _early_stopping(key: str, state: Any) -> tuple[str, Any]:
    """Translate the key and state of Lightning's EarlyStopping; return other callbacks unchanged."""
    match = re.fullmatch(r"EarlyStopping(\{.*\})", key)
    if match is None:
        return key, state
    settings = ast.literal_eval(match.group(1))
    return f"EarlyStopping[{settings['monitor']},{settings['mode']}]", {
        "wait_count": state["wait_count"],
        "stopped_epoch": state["stopped_epoch"],
        "best_score": float(state["best_score"]),
    }


LIGHTNING = ForeignFormat("Lightning", is_lightnings, translate)
