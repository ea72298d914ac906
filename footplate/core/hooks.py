"""Hooks, resolved once.

Modules and callbacks have some seventy hooks; a program overrides three. `Hooks` looks each one up when training
begins and keeps, for every hook name, the functions that really do something, in the order in which they are called:

    callbacks in their order  →  the data module  →  the module  →  late callbacks

A hook that nobody overrides is an empty tuple, so that asking costs nothing in the loop. Late callbacks (`order` above 0)
are on their own: `EarlyStopping` acts on what the others log, `ModelCheckpoint` saves what all of them did.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from footplate.core.adapters import Adapter, adapter_of, is_adapted_base
from footplate.core.errors import ConfigError

Hook = Callable[..., Any]
Kind = TypeVar("Kind", bound=type)
NONE: tuple[Hook, ...] = ()


class Hooks:
    """The overridden hooks of one run.

    Each hook is a tuple of functions that take the arguments of the module's hook (a callback's `trainer` and `module`
    arguments are already in place).

    Args:
        trainer: what callbacks are given first.
        module: what they are given second; its own hooks come after theirs.
        datamodule: its hooks come between the two; None for none.
        callbacks: in the order in which they are called.
        before_looking: called before each hook of somebody who may look at the weights: where these live on a device of
            their own, they are fetched. A data module is not expected to look.
        profile: the context in which a call is recorded under a name; None for no profiler.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        datamodule: Any,
        callbacks: Iterable[Any],
        before_looking: Callable[[], None] | None = None,
        profile: Callable[[str], Any] | None = None,
    ) -> None:
        self._profile = profile
        self._trainer = trainer
        self._module, self._callbacks, self._before_looking = module, list(callbacks), before_looking
        self._owners: list[tuple[Any, tuple[Any, ...]]] = [
            (callback, (trainer, module)) for callback in callbacks if not order_of(callback)
        ]
        if datamodule is not None:
            self._owners.append((datamodule, ()))
        self._owners.append((module, ()))
        self._late = [(callback, (trainer, module)) for callback in callbacks if order_of(callback)]
        self._found: dict[str, tuple[Hook, ...]] = {}
        self._set_on: dict[
            tuple[int, str], tuple[Any, Any]
        ] = {}  # an owner, and what was set on it under a hook's name

    def get(self, name: str) -> tuple[Hook, ...]:
        """Every overridden `name`, but for those of late callbacks."""
        return self._cached(name, name, self._owners)

    def late(self, name: str) -> tuple[Hook, ...]:
        """The overridden `name` of late callbacks."""
        return self._cached(f"late:{name}", name, self._late)

    def weight_readers(self, name: str) -> list[str]:
        """Who overrides `name` and may look at the weights, or change them, by their classes' names."""
        owners = [owner for owner in (*self._callbacks, self._module) if may_look(owner)]
        return [type(owner).__name__ for owner in owners if overrides(owner, name)]

    @property
    def looking(self) -> list[str]:
        """The callbacks that may look at the weights, by their classes' names."""
        return [type(callback).__name__ for callback in self._callbacks if may_look(callback)]

    def callbacks_with(self, name: str) -> list[str]:
        """The callbacks that override `name`, by their classes' names."""
        return [type(callback).__name__ for callback in self._callbacks if overrides(callback, name)]

    def replaced(self) -> list[str]:
        """The hooks that were set on a callback or module after they had been looked up, such as "Net.on_train_end"."""
        return [
            f"{type(owner).__name__}.{name}"
            for (_, name), (owner, before) in self._set_on.items()
            if vars(owner).get(name) is not before
        ]

    def call(self, name: str, *args: Any, **named: Any) -> None:
        """Call every overridden `name`, those of late callbacks last."""
        for hook in self.get(name):
            hook(*args, **named)
        for hook in self.late(name):
            hook(*args, **named)

    def _cached(self, key: str, name: str, owners: list[tuple[Any, tuple[Any, ...]]]) -> tuple[Hook, ...]:
        found = self._found.get(key)
        if found is None:
            found = tuple(self._function(owner, name, args) for owner, args in owners if overrides(owner, name))
            self._found[key] = found
            for owner, _ in owners:
                self._set_on[id(owner), name] = owner, vars(owner).get(name)
        return found

    def _function(self, owner: Any, name: str, args: tuple[Any, ...]) -> Hook:
        hook = functools.partial(getattr(owner, name), *args) if args else getattr(owner, name)
        if name == "on_train_batch_end" and (adapter := adapter_of(owner)) is not None:
            hook = functools.partial(_with_adapted_output, hook, adapter, self._trainer)
        if self._profile is not None:
            hook = self._recorded(hook, f"{self._title(owner)}.{name}", self._profile)
        before = self._before_looking
        if before is None or not may_look(owner):
            return hook

        def looking(*given: Any, **named: Any) -> Any:
            before()
            return hook(*given, **named)

        return looking

    def _title(self, owner: Any) -> str:
        """What a profiler calls a hook's owner."""
        if any(owner is callback for callback in self._callbacks):
            return f"[Callback]{getattr(owner, 'state_key', type(owner).__qualname__)}"
        return f"[{'LightningModule' if owner is self._module else 'LightningDataModule'}]{type(owner).__name__}"

    def _recorded(self, hook: Hook, action: str, profile: Callable[[str], Any]) -> Hook:
        def recorded(*given: Any, **named: Any) -> Any:
            with profile(action):
                return hook(*given, **named)

        return recorded


def _with_adapted_output(hook: Hook, adapter: Adapter, trainer: Any, output: Any, batch: Any, batch_idx: int) -> None:
    """Call `on_train_batch_end` of another library's class with the output in the form that the library gives it."""
    hook(adapter.batch_outputs(output, trainer), batch, batch_idx)


def may_look(owner: Any) -> bool:
    """Whether a hook's owner may look at the module's weights, or change them: all but data and some callbacks of ours."""
    if hasattr(owner, "train_dataloader") and not hasattr(owner, "training_step"):
        return False
    return getattr(owner, "sees_weights", True) or not type(owner).__module__.startswith("footplate.")


def order_of(callback: Any) -> int:
    """When a callback is called; see `Callback`."""
    return getattr(callback, "order", 0)


_EMPTY: set[type] = set()


def empty_hooks(kind: Kind) -> Kind:
    """Class decorator for a base class whose hook methods are empty: they don't count as overridden."""
    _EMPTY.add(kind)
    return kind


def overrides(owner: Any, name: str) -> bool:
    """Return True if an object has a hook of its own: on the object itself, in its class, or in a class between.

    A hook that is set to None does nothing.
    """
    if name in vars(owner):
        return vars(owner)[name] is not None
    for kind in type(owner).__mro__:
        if name in vars(kind):
            return vars(kind)[name] is not None and kind not in _EMPTY and not is_adapted_base(kind)
    return False


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
