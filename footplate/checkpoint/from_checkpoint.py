"""`load_from_checkpoint`: build a module or a data module from a checkpoint, with its saved hyper-parameters."""

from __future__ import annotations

import inspect
from typing import Any

from footplate.checkpoint.loading import load
from footplate.checkpoint.storage import Place
from footplate.core.errors import CheckpointError, ConfigError, did_you_mean


def load_module(cls: type, path: str | Place, map_location: Any, strict: bool | None, arguments: dict[str, Any]) -> Any:
    """Build a module and load its weights; see `footplate.Module.load_from_checkpoint`."""
    from footplate.checkpoint.frozen_weights import fill_in
    from footplate.checkpoint.run_state import load_weights
    from footplate.core.hooks import overrides
    from footplate.distributed.meta_device import configure_layers

    state = load(path, map_location)
    module = _build(cls, state, path, arguments)
    if overrides(module, "configure_model"):
        configure_layers(module)
    module.on_load_checkpoint(state)
    state = fill_in(state, module, str(path))
    strict = bool(getattr(module, "strict_loading", True)) if strict is None else strict
    load_weights(module, state, str(path), strict)
    return module.to(map_location) if map_location not in (None, "cpu") else module


def load_datamodule(cls: type, path: str | Place, arguments: dict[str, Any]) -> Any:
    """Build a data module and load its state; see `footplate.DataModule.load_from_checkpoint`."""
    state = load(path)
    datamodule = _build(cls, state, path, arguments, "datamodule_")

    # Lightning's files keep the state under the name of the class.
    saved = state.get("datamodule") or state.get(cls.__qualname__)
    if saved:
        datamodule.load_state_dict(saved)
    return datamodule


def _build(cls: type, state: dict[str, Any], path: str | Place, arguments: dict[str, Any], prefix: str = "") -> Any:
    """Construct a class from the hyper-parameters in a state; `arguments` override them."""
    from footplate.core.hparams import arguments_from

    # *args and **kwargs have no names of their own.
    parameters = inspect.signature(cls.__init__).parameters
    variadic = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    names = [name for name, parameter in parameters.items() if parameter.kind not in variadic]
    values = arguments_from(state, names[1:], arguments, prefix)

    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in arguments:
            if name not in parameters and name not in (state.get(f"{prefix}hyper_parameters") or {}):
                raise ConfigError(f"{cls.__name__} takes no {name}. {did_you_mean(name, list(parameters)[1:])}")
        values = {name: value for name, value in values.items() if name in parameters}

    missing = [
        name
        for name, p in list(parameters.items())[1:]
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in values
    ]
    if missing:
        raise CheckpointError(
            f"{path} does not hold the argument{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {cls.__name__}: "
            f"pass {'them' if len(missing) > 1 else 'it'}, as in "
            f"{cls.__name__}.load_from_checkpoint(path, {missing[0]}=…)."
        )
    return cls(**values)
