"""Hyper-parameters: the arguments of `__init__`, kept to compare runs and to build a module again from a checkpoint.

    class Classifier(fp.Module):
        def __init__(self, net, lr=1e-3, classes=10):
            super().__init__()
            self.save_hyperparameters(ignore="net")     # self.hparams.lr, self.hparams["classes"]

Loggers record hyper-parameters. Checkpoints keep those that are plain values, and `Classifier.load_from_checkpoint(path,
net=…)` passes them to `__init__`.
"""

from __future__ import annotations

import copy
import enum
import inspect
from argparse import Namespace
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from footplate.core.errors import ConfigError, did_you_mean

# LightningCLI keeps here how it built an object.
_OF_COMMAND_LINE = ("_class_path", "_instantiator")


class AttributeDict(dict[str, Any]):
    """A dictionary whose string keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"there is no hyper-parameter {name!r}; there are: {', '.join(self) or 'none'}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class HyperParameters:
    """Hyper-parameters of a `Module` or a `DataModule`, which inherit from this class."""

    _hparams: AttributeDict | None = None
    # The name for all values, or for the argument of `__init__` that held all of them.
    _hparams_name: str = "kwargs"
    _log_hyperparams: bool = True

    @property
    def hparams(self) -> AttributeDict:
        """The saved hyper-parameters. Read and change them as attributes or as items."""
        if self._hparams is None:
            object.__setattr__(self, "_hparams", AttributeDict())
        assert self._hparams is not None
        return self._hparams

    @property
    def hparams_initial(self) -> AttributeDict:
        """The hyper-parameters as they were when saved: a deep copy, safe to change."""
        return copy.deepcopy(self.__dict__.get("_hparams_initial", AttributeDict()))

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Sequence[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of the calling `__init__` in `self.hparams`.

        Args:
            *args: the names to keep (all if none are given), or one dict or namespace to keep as a whole.
            ignore: a name or names to leave out, such as modules and loss functions.
            frame: the frame whose arguments to save. By default the caller's.
            logger: whether loggers record them.

        Raises:
            ConfigError: a name that `__init__` does not have.
        """
        chosen: dict[str, Any] = {}
        caller = frame or inspect.currentframe().f_back  # type: ignore[union-attr]
        arguments = _init_arguments(self, caller)
        whole = None
        if len(args) == 1 and not isinstance(args[0], str):
            chosen.update(args[0] if isinstance(args[0], dict) else vars(args[0]))
            whole = next((name for name, value in arguments.items() if value is args[0]), None)
        else:
            chosen.update(arguments)
            unknown = next((name for name in args if name not in chosen), None)
            if unknown is not None:
                raise ConfigError(
                    f'save_hyperparameters("{unknown}"): {type(self).__name__}.__init__ has no such argument. '
                    f"{did_you_mean(unknown, chosen)}"
                )
            if args:
                chosen = {name: chosen[name] for name in args}
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        chosen = {name: value for name, value in chosen.items() if name not in ignored}

        self.hparams.update(chosen)
        object.__setattr__(self, "_hparams_name", whole or "kwargs")
        object.__setattr__(self, "_log_hyperparams", logger)
        object.__setattr__(self, "_hparams_initial", AttributeDict({**self.hparams_initial, **_copy_plain(chosen)}))


def plain(value: Any) -> Any:
    """Return `value` in a form that a checkpoint loads without executing code. Raise TypeError if there is none."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.Tensor, torch.dtype, torch.device)):
        return value
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return type(value)(plain(item) for item in value)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(f"a {type(value).__name__} can't be kept")


def split_plain(hparams: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the hyper-parameters that a checkpoint can keep, and the names of the rest."""
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for name, value in hparams.items():
        try:
            kept[name] = plain(value)
        except TypeError:
            dropped.append(name)
    return kept, dropped


def to_state(owner: Any, prefix: str = "") -> dict[str, Any]:
    """Return what a checkpoint keeps of the hyper-parameters of a module, under Lightning's names.

    With a prefix, `owner` is a data module.
    """
    hparams = dict(getattr(owner, "hparams", None) or {})
    namespaces = [name for name, value in hparams.items() if type(value) is Namespace]
    kept, dropped = split_plain({**hparams, **{name: vars(hparams[name]) for name in namespaces}})
    return {
        f"{prefix}hyper_parameters": kept,
        f"{prefix}hyper_parameters_dropped": dropped,
        f"{prefix}hyper_parameters_namespaces": [name for name in namespaces if name in kept],
        f"{prefix}hparams_name": getattr(owner, "_hparams_name", None) or "kwargs",
    }


def arguments_from(
    state: dict[str, Any], parameters: Collection[str], overrides: dict[str, Any], prefix: str = ""
) -> Any:
    """Return the arguments for an `__init__` with `parameters`: those of the checkpoint, overridden by `overrides`."""
    kept = dict(state.get(f"{prefix}hyper_parameters") or {})
    for name in state.get(f"{prefix}hyper_parameters_namespaces", ()):
        kept[name] = Namespace(**kept[name])
    whole = state.get(f"{prefix}hparams_name")
    if whole not in parameters or whole in kept:
        return {**kept, **overrides}
    beside = {name: value for name, value in overrides.items() if name in parameters}
    together = AttributeDict({**kept, **{name: value for name, value in overrides.items() if name not in parameters}})
    return {whole: together, **{name: value for name, value in kept.items() if name in parameters}, **beside}


def hparams_to_log(module: Any, datamodule: Any) -> dict[str, Any]:
    """Return the hyper-parameters that loggers record: those of the module and of the data module.

    Raises:
        ConfigError: both have a hyper-parameter of one name, with different values.
    """
    logged = [
        {name: value for name, value in (getattr(owner, "hparams", None) or {}).items() if name not in _OF_COMMAND_LINE}
        if getattr(owner, "_log_hyperparams", True)
        else {}
        for owner in (datamodule, module)
    ]
    for name in logged[0].keys() & logged[1].keys():
        values = [hparams[name] for hparams in logged]
        if not _alike(*values):
            raise ConfigError(
                f"The hyper-parameter {name!r} is {values[1]!r} in the module and {values[0]!r} in the data module. "
                "Loggers keep one value of a name. Rename one of them, or call "
                "save_hyperparameters(logger=False) in one of the classes."
            )
    return {**logged[0], **logged[1]}


def _alike(first: Any, second: Any) -> bool:
    if first is second:
        return True
    try:
        return type(first) is type(second) and bool(first == second)
    except Exception:
        # The comparison of two arrays has several values, which have no truth value together.
        return False


def _init_arguments(owner: object, frame: FrameType | None) -> dict[str, Any]:
    """Return the arguments of every `__init__` of `owner`, from `frame` outwards. A subclass's win over its base's."""
    arguments: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name == "__init__":
        if frame.f_locals.get(frame.f_code.co_varnames[0]) is not owner:
            break
        values = inspect.getargvalues(frame)
        for name in values.args[1:]:
            arguments[name] = values.locals[name]
        if values.keywords:
            arguments.update(values.locals[values.keywords])
        frame = frame.f_back
    return arguments


def _copy_plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in split_plain(values)[0].items()}
