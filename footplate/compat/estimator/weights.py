"""Loads weights of a checkpoint into a model's modules: all weights for an evaluation, some of them for a warm start.

The name of a tensor is the name of `get_module`, and the tensor's name in its module: `net.0.weight`. Checkpoints of
Estimators have the prefix `parts.` before it; checkpoints of other modules have none.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from footplate import checkpoint
from footplate.checkpoint.storage import Place, to_place
from footplate.compat.estimator.model import ModelOfFunction
from footplate.compat.estimator.spec import WarmStartSettings
from footplate.core.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
_PREFIX = "parts."


def newest(model_dir: Place) -> Place | None:
    """The newest complete checkpoint in an Estimator's directory; None without one."""
    return checkpoint.newest([model_dir / CHECKPOINTS])


def load(model: ModelOfFunction, path: str | Place) -> int:
    """Load all tensors of a model's modules from a checkpoint. Return its global step.

    Raises:
        CheckpointError: the checkpoint lacks a tensor, or has it in another shape.
    """
    state = checkpoint.load(path)
    saved, own = _named(state["state_dict"]), _named(model.state_dict())
    absent = [name for name in own if name not in saved]
    if absent:
        raise CheckpointError(
            f'{path} has no "{absent[0]}": the checkpoint is of another model_fn, or only one mode makes the module. Ask '
            "for the same modules in every mode."
        )
    _take(model, {name: saved[name] for name in own}, str(path))
    return int(state["global_step"])


def warm_start(model: ModelOfFunction, settings: WarmStartSettings) -> None:
    """Load the tensors that the settings choose from another checkpoint; see `WarmStartSettings`.

    Raises:
        CheckpointError: there is no checkpoint, or it lacks one of the tensors, or has it in another shape.
        ConfigError: the settings name tensors that the model doesn't have.
    """
    source = to_place(settings.ckpt_to_initialize_from)
    path = newest(source) or source
    saved, own = _named(checkpoint.load(path)["state_dict"]), _named(model.state_dict())
    chosen = [name for name in own if any(re.match(pattern, name) for pattern in settings.patterns)]
    renamed = settings.var_name_to_prev_var_name
    if not chosen:
        raise ConfigError(
            f"WarmStartSettings(vars_to_warm_start={settings.vars_to_warm_start!r}): the model_fn has no tensor whose name "
            f"matches. There are: {_some(own)}."
        )
    for name in renamed:
        if name not in own:
            raise ConfigError(
                f'WarmStartSettings(var_name_to_prev_var_name): the model_fn has no "{name}". There are: {_some(own)}.'
            )
    for name in chosen:
        if renamed.get(name, name) not in saved:
            raise CheckpointError(
                f'warm_start_from: {path} has no "{renamed.get(name, name)}". Leave "{name}" out of vars_to_warm_start, or '
                f"give its name there in var_name_to_prev_var_name. There are: {_some(saved)}."
            )
    _take(model, {name: saved[renamed.get(name, name)] for name in chosen}, str(path))
    log.info("Beginning with %d of %d tensors from %s.", len(chosen), len(own), path)


def _named(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a state dict, with their names inside the modules."""
    return {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}


def _take(model: ModelOfFunction, values: Mapping[str, Any], source: str) -> None:
    """Load values into the modules, after comparing all shapes.

    Raises:
        CheckpointError: a value has another shape.
    """
    own = _named(model.state_dict())
    for name, value in values.items():
        wanted, actual = (getattr(tensor, "shape", None) for tensor in (own[name], value))
        if wanted != actual:
            raise CheckpointError(
                f'{source} has "{name}" in the shape {tuple(actual or ())}, and model_fn makes it {tuple(wanted or ())}. '
                "Use the params that the checkpoint was trained with."
            )
    model.load_state_dict({f"{_PREFIX}{name}": value for name, value in values.items()}, strict=False)


def _some(names: Iterable[str]) -> str:
    first = list(islice(names, 21))
    return ", ".join(first[:20]) + (", …" if len(first) > 20 else "")
