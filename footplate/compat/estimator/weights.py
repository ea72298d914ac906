"""Weights of a checkpoint into a model's modules: all of them to evaluate, and those that fit to begin training with.

A tensor goes by the name that it has in its module, after the name that `get_module` was given: `net.0.weight`. In
checkpoints of Estimators that stands behind `parts.`; those of other modules are taken as they are.
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
    """The newest complete checkpoint of an Estimator's directory; None without one."""
    return checkpoint.newest([model_dir / CHECKPOINTS])


def load(model: ModelOfFunction, path: str | Place) -> int:
    """All that a model's modules keep, from a checkpoint; returns its global step.

    Raises:
        CheckpointError: it lacks something, or has it in another shape.
    """
    state = checkpoint.load(path)
    saved, own = _named(state["state_dict"]), _named(model.state_dict())
    absent = [name for name in own if name not in saved]
    if absent:
        raise CheckpointError(
            f'{path} has no "{absent[0]}": it is of another model_fn, or the module is made in one mode alone. Ask for '
            "the same modules in every mode."
        )
    _take(model, {name: saved[name] for name in own}, str(path))
    return int(state["global_step"])


def warm_start(model: ModelOfFunction, settings: WarmStartSettings) -> None:
    """Begin with a checkpoint's tensors where the settings say so; see `WarmStartSettings`.

    Raises:
        CheckpointError: there is no checkpoint, or it lacks one of the tensors, or has it in another shape.
        ConfigError: the settings name tensors that the model doesn't have.
    """
    given = to_place(settings.ckpt_to_initialize_from)
    path = newest(given) or given
    saved, own = _named(checkpoint.load(path)["state_dict"]), _named(model.state_dict())
    chosen = [name for name in own if any(re.match(pattern, name) for pattern in settings.patterns)]
    there = settings.var_name_to_prev_var_name
    if not chosen:
        raise ConfigError(
            f"WarmStartSettings(vars_to_warm_start={settings.vars_to_warm_start!r}): the model_fn has no tensor whose name "
            f"begins like that. There are: {_some(own)}."
        )
    for name in there:
        if name not in own:
            raise ConfigError(
                f'WarmStartSettings(var_name_to_prev_var_name): the model_fn has no "{name}". There are: {_some(own)}.'
            )
    for name in chosen:
        if there.get(name, name) not in saved:
            raise CheckpointError(
                f'warm_start_from: {path} has no "{there.get(name, name)}". Leave "{name}" out of vars_to_warm_start, or '
                f"say by var_name_to_prev_var_name what it is called there. There are: {_some(saved)}."
            )
    _take(model, {name: saved[there.get(name, name)] for name in chosen}, str(path))
    log.info("Beginning with %d of %d tensors from %s.", len(chosen), len(own), path)


def _named(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint keeps, under the names that it has within its modules."""
    return {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}


def _take(model: ModelOfFunction, values: Mapping[str, Any], source: str) -> None:
    """Put values in place, after all shapes have been compared.

    Raises:
        CheckpointError: some don't fit.
    """
    own = _named(model.state_dict())
    for name, value in values.items():
        wanted, found = (getattr(one, "shape", None) for one in (own[name], value))
        if wanted != found:
            raise CheckpointError(
                f'{source} has "{name}" in the shape {tuple(found or ())}, and model_fn makes it {tuple(wanted or ())}: '
                "with other params?"
            )
    model.load_state_dict({f"{_PREFIX}{name}": value for name, value in values.items()}, strict=False)


def _some(names: Iterable[str]) -> str:
    first = list(islice(names, 21))
    return ", ".join(first[:20]) + (", …" if len(first) > 20 else "")
