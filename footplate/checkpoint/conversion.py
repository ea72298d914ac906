"""Conversion of checkpoints. The target's suffix chooses the form:

    weights.safetensors    the weights under the module's own names: for any reader of safetensors
    model.pt               the whole state as a torch file: for torch.load(weights_only=True) and for
                           LightningModule.load_from_checkpoint
    run.ckpt               a Footplate checkpoint: from a Lightning `.ckpt` file, or copied from another store

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
from footplate.checkpoint.frozen_weights import FROZEN_WEIGHTS
from footplate.checkpoint.storage import Place, store_of, to_place
from footplate.core.errors import CheckpointError, ConfigError
from footplate.core.foreign_checkpoints import to_run_state

FORMS = {".safetensors": "weights", ".pt": "torch file", ".pth": "torch file", checkpoint.SUFFIX: "checkpoint"}


def convert(source: str | Place, target: str | Place, force: bool = False) -> str:
    """Convert a checkpoint to another form. The target is written completely or not at all.

    Args:
        source: a Footplate checkpoint, or a torch file, such as another library's.
        target: the file or checkpoint to write; its suffix chooses the form.
        force: replace an existing target.

    Returns:
        What the target lacks, in one sentence; an empty text if it lacks nothing.

    Raises:
        ConfigError: the suffix names no form, or the target exists.
        CheckpointError: the source can't be read, or holds a value that the form can't represent.
    """
    place = to_place(target)
    form = FORMS.get(Path(place.name).suffix)
    if form is None:
        raise ConfigError(f"{target}: expected a name that ends in {', '.join(FORMS)}, to choose the form.")
    if store_of(place).kind(place) is not None and not force:
        raise ConfigError(f"{target} exists already. Use another name, or --force to replace it.")
    if store_of(place).resolve(place) == store_of(to_place(source)).resolve(to_place(source)):
        raise ConfigError(f"{target} is the source itself. Use another name.")

    state = checkpoint.load(source)
    if form == "weights":
        lacks = _write_weights(state["state_dict"], place)
    elif form == "torch file":
        plain = _without_arrays(state)
        store_of(place).write_file(place, lambda file: torch.save(plain, file))
        lacks = ""
    else:
        return _write_checkpoint(state, place)
    frozen = len(state.get(FROZEN_WEIGHTS, {}))
    if not frozen:
        return lacks
    return f"It lacks {frozen} frozen weights, which the checkpoint was saved without. {lacks}".rstrip()


def _write_weights(weights: dict[str, Any], target: Place) -> str:
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}

    def write(file: BinaryIO) -> None:
        statefile.write_tensors(tensors, file)

    store_of(target).write_file(target, write)
    left_out = sorted(weights.keys() - tensors.keys())
    return f"It lacks {', '.join(left_out)}: no tensor." if left_out else ""


def _write_checkpoint(state: dict[str, Any], target: Place) -> str:
    state = to_run_state(state)
    if "footplate" not in state:
        raise CheckpointError(
            "The source holds weights alone, without the run that they belong to, so it can't become a checkpoint."
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
        return "It holds weights only, like the source."
    return "Training continues from it with Footplate's order of the data and random draws."


def _without_arrays(value: Any) -> Any:
    """Replace arrays by tensors, because `weights_only` forbids to unpickle arrays."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_arrays(item) for item in value]
    if type(value) is tuple:
        return tuple(_without_arrays(item) for item in value)
    return value
