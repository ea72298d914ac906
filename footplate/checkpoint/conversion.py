"""Checkpoints in other forms. What comes out is said by the target's name:

    weights.safetensors    the weights under the module's own names: for any reader of safetensors
    model.pt               the whole state as a torch file: for torch.load(weights_only=True) and for
                           LightningModule.load_from_checkpoint
    run.ckpt               a checkpoint of ours: from a Lightning `.ckpt` file; or a copy, from one store to another

Source and target may each be a path or a URI.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from footplate import checkpoint
from footplate.checkpoint.format import statefile
from footplate.checkpoint.lightning import is_lightnings, translate
from footplate.checkpoint.storage import Place, store_of, to_place
from footplate.core.errors import CheckpointError, ConfigError

FORMS = {".safetensors": "weights", ".pt": "torch file", ".pth": "torch file", checkpoint.SUFFIX: "checkpoint"}


def convert(source: str | Place, target: str | Place, force: bool = False) -> str:
    """Write a checkpoint in another form, whole or not at all.

    Args:
        source: a checkpoint of ours, or a file of Lightning's or torch's.
        target: what to write; its suffix says in which form.
        force: replace what is there.

    Returns:
        What the target lacks, in one sentence; nothing, if it lacks nothing.

    Raises:
        ConfigError: a suffix that says no form, or a target that is there.
        CheckpointError: the source can't be read, or holds what the form has no place for.
    """
    place = to_place(target)
    form = FORMS.get(Path(place.name).suffix)
    if form is None:
        raise ConfigError(f"{target}: expected a name that ends in {', '.join(FORMS)}, which says what to write.")
    if store_of(place).kind(place) is not None and not force:
        raise ConfigError(f"{target} is there already. Give another name, or --force to replace it.")
    if store_of(place).resolve(place) == store_of(to_place(source)).resolve(to_place(source)):
        raise ConfigError(f"{target} is the source itself. Give another name.")
    state = checkpoint.load(source)
    if form == "weights":
        return _write_weights(state["state_dict"], place)
    if form == "torch file":
        plain = _without_arrays(state)
        store_of(place).write_file(place, lambda file: torch.save(plain, file))
        return ""
    return _write_checkpoint(state, place)


def _write_weights(weights: dict[str, Any], target: Place) -> str:
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}

    def write(file: BinaryIO) -> None:
        statefile.write_tensors(tensors, file)

    store_of(target).write_file(target, write)
    others = sorted(weights.keys() - tensors.keys())
    return f"It lacks {', '.join(others)}: no tensor." if others else ""


def _write_checkpoint(state: dict[str, Any], target: Place) -> str:
    if is_lightnings(state):
        state = translate(state)
    elif "footplate" not in state:
        raise CheckpointError(
            "The source is a bare file of weights, of which no checkpoint can be made: nothing says of which run."
        )
    progress = state.get("progress", {})
    meta = {
        **state["footplate"],
        "module": state.get("module"),
        "epoch": state["epoch"],
        "global_step": state["global_step"],
        "batches": progress.get("batches", 0),
        "weights_only": not progress,
        "metrics": state.get("callback_metrics", {}),
        **({"made_by": state["made_by"]} if "made_by" in state else {}),
    }
    checkpoint.save(state, target, meta)
    if "made_by" not in state:
        return ""
    if not progress:
        return "It holds weights only, as the source does."
    return "Training continues from it with an order of the data and random draws of Footplate's own."


def _without_arrays(value: Any) -> Any:
    """A state with tensors in the place of arrays, whose unpickling `weights_only` forbids."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_arrays(item) for item in value]
    if type(value) is tuple:
        return tuple(_without_arrays(item) for item in value)
    return value
