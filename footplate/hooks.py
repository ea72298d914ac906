"""Hooks, resolved once.

Modules and callbacks have some seventy hooks; a program overrides three. `Hooks` looks each one up when training
begins and keeps, for every hook name, the functions that really do something, in the order in which they are called:

    callbacks in their order  →  the data module  →  the module  →  late callbacks

A hook that nobody overrides is an empty tuple, so that asking costs nothing in the loop. Late callbacks (`turn` above 0)
are on their own: `EarlyStopping` acts on what the others log, `ModelCheckpoint` saves what all of them did.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from footplate.errors import ConfigError

if TYPE_CHECKING:
    from footplate.trainer import Trainer

Hook = Callable[..., Any]
NONE: tuple[Hook, ...] = ()


class Hooks:
    """The overridden hooks of one run.

    Attributes are hook names; each is a tuple of functions that take the arguments of the module's hook (a callback's
    `trainer` and `module` arguments are already in place).
    """

    def __init__(self, trainer: Trainer, module: Any, datamodule: Any, callbacks: Iterable[Any]) -> None:
        self._owners: list[tuple[Any, tuple[Any, ...]]] = [
            (callback, (trainer, module)) for callback in callbacks if not turn(callback)
        ]
        if datamodule is not None:
            self._owners.append((datamodule, ()))
        self._owners.append((module, ()))
        self._late = [(callback, (trainer, module)) for callback in callbacks if turn(callback)]
        self._found: dict[str, tuple[Hook, ...]] = {}

    def get(self, name: str) -> tuple[Hook, ...]:
        """Every overridden `name`, but for those of late callbacks."""
        return self._cached(name, name, self._owners)

    def late(self, name: str) -> tuple[Hook, ...]:
        """The overridden `name` of late callbacks."""
        return self._cached(f"late:{name}", name, self._late)

    def call(self, name: str, *args: Any) -> None:
        """Call every overridden `name`, those of late callbacks last."""
        for hook in self.get(name):
            hook(*args)
        for hook in self.late(name):
            hook(*args)

    def _cached(self, key: str, name: str, owners: list[tuple[Any, tuple[Any, ...]]]) -> tuple[Hook, ...]:
        found = self._found.get(key)
        if found is None:
            found = tuple(
                functools.partial(getattr(owner, name), *args) if args else getattr(owner, name)
                for owner, args in owners
                if overrides(owner, name)
            )
            self._found[key] = found
        return found


def turn(callback: Any) -> int:
    """When a callback is called; see `Callback`."""
    return getattr(callback, "turn", 0)


def overrides(owner: Any, name: str) -> bool:
    """Whether an object does something of its own in a hook: in its class, a class between, or on the object itself."""
    if name in vars(owner):
        return True
    function = getattr(type(owner), name, None)
    return function is not None and not _is_ours_or_lightnings(function)


def _is_ours_or_lightnings(function: Any) -> bool:
    """Whether a function is the empty default of a base class."""
    home = getattr(function, "__module__", "") or ""
    name = getattr(function, "__qualname__", "")
    bases = ("Module.", "ModuleHooks.", "DataModule.", "Callback.", "LightningModule.", "LightningDataModule.")
    bases += ("ModelHooks.", "DataHooks.", "CheckpointHooks.", "_DeviceDtypeModuleMixin.")
    at_home = home.startswith(("footplate.", "lightning.", "pytorch_lightning."))
    return at_home and name.startswith(bases)


def step_arguments(step: Callable[..., Any], name: str) -> int:
    """How many of `(batch, batch_idx, dataloader_idx)` a step function takes.

    Raises:
        ConfigError: it asks for the loader's iterator, which would take the loop out of the trainer's hands.
    """
    parameters = inspect.signature(step).parameters
    if "dataloader_iter" in parameters:
        raise ConfigError(f"{name}(dataloader_iter) is not supported: take (batch, batch_idx) instead.")
    positional = 0
    for parameter in parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return 3
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            positional += 1
    if positional == 0:
        raise ConfigError(f"{name}() takes no arguments: it needs at least the batch.")
    return min(positional, 3)
