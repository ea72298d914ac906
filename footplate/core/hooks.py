"""Hooks of modules, data modules and callbacks, looked up once per run.

Modules and callbacks have some seventy hooks, and a program overrides a few of them. `Hooks` looks each hook up when it is
first needed. It keeps the functions that override it, in the order in which they are called:

    callbacks in their order  →  the data module  →  the module  →  late callbacks

A hook that no class overrides is an empty tuple, so it costs nothing in the training loop. Late callbacks have an `order`
above 0, and are called separately: `EarlyStopping` acts on values that other callbacks log, and `ModelCheckpoint` saves the
work of all others.
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

    Each hook is a tuple of functions that take the arguments of the module's hook. A callback's `trainer` and `module`
    arguments are already bound.

    Args:
        trainer: the first argument of a callback's hooks.
        module: the second argument of a callback's hooks. Its own hooks are called after theirs.
        datamodule: its hooks are called between the callbacks' and the module's; None for no data module.
        callbacks: the callbacks, in the order in which they are called.
        before_looking: called before each hook that may read or change the weights, so that weights on another device
            can be copied back. Hooks of a data module don't count.
        profile: returns a context that records a call under a name; None for no profiler.
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
        self._cache: dict[str, tuple[Hook, ...]] = {}
        # For an owner's id and a hook's name: the owner, and the value that was set on the object under that name.
        self._set_on: dict[tuple[int, str], tuple[Any, Any]] = {}

    def get(self, name: str) -> tuple[Hook, ...]:
        """The overridden hooks of a name, without those of late callbacks."""
        return self._cached(name, name, self._owners)

    def late(self, name: str) -> tuple[Hook, ...]:
        """The overridden hooks of a name of late callbacks."""
        return self._cached(f"late:{name}", name, self._late)

    def weight_readers(self, name: str) -> list[str]:
        """Class names of the callbacks and the module that override a hook and may read or change the weights."""
        owners = [owner for owner in (*self._callbacks, self._module) if may_look(owner)]
        return [type(owner).__name__ for owner in owners if overrides(owner, name)]

    @property
    def looking(self) -> list[str]:
        """Class names of the callbacks that may read or change the weights."""
        return [type(callback).__name__ for callback in self._callbacks if may_look(callback)]

    def callbacks_with(self, name: str) -> list[str]:
        """Class names of the callbacks that override a hook."""
        return [type(callback).__name__ for callback in self._callbacks if overrides(callback, name)]

    def replaced(self) -> list[str]:
        """Hooks that were set on a callback or module after the lookup, such as "Net.on_train_end"."""
        return [
            f"{type(owner).__name__}.{name}"
            for (_, name), (owner, before) in self._set_on.items()
            if vars(owner).get(name) is not before
        ]

    def call(self, name: str, *args: Any, **named: Any) -> None:
        """Call every overridden hook of a name, those of late callbacks last."""
        for hook in self.get(name):
            hook(*args, **named)
        for hook in self.late(name):
            hook(*args, **named)

    def _cached(self, key: str, name: str, owners: list[tuple[Any, tuple[Any, ...]]]) -> tuple[Hook, ...]:
        hooks = self._cache.get(key)
        if hooks is None:
            hooks = tuple(self._function(owner, name, args) for owner, args in owners if overrides(owner, name))
            self._cache[key] = hooks
            for owner, _ in owners:
                self._set_on[id(owner), name] = owner, vars(owner).get(name)
        return hooks

    def _function(self, owner: Any, name: str, args: tuple[Any, ...]) -> Hook:
        hook = functools.partial(getattr(owner, name), *args) if args else getattr(owner, name)
        if name == "on_train_batch_end" and (adapter := adapter_of(owner)) is not None:
            hook = functools.partial(_with_adapted_output, hook, adapter, self._trainer)
        if self._profile is not None:
            hook = self._recorded(hook, f"{self._title(owner)}.{name}", self._profile)
        before = self._before_looking
        if before is None or not may_look(owner):
            return hook

        def after_copying_back(*args: Any, **kwargs: Any) -> Any:
            before()
            return hook(*args, **kwargs)

        return after_copying_back

    def _title(self, owner: Any) -> str:
        """The name of a hook's owner in a profile."""
        if any(owner is callback for callback in self._callbacks):
            return f"[Callback]{getattr(owner, 'state_key', type(owner).__qualname__)}"
        return f"[{'LightningModule' if owner is self._module else 'LightningDataModule'}]{type(owner).__name__}"

    def _recorded(self, hook: Hook, action: str, profile: Callable[[str], Any]) -> Hook:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with profile(action):
                return hook(*args, **kwargs)

        return recorded


def _with_adapted_output(hook: Hook, adapter: Adapter, trainer: Any, output: Any, batch: Any, batch_idx: int) -> None:
    """Call `on_train_batch_end` of another library's class with the output in the form that the library gives it."""
    hook(adapter.batch_outputs(output, trainer), batch, batch_idx)


def may_look(owner: Any) -> bool:
    """Return True if a hook's owner may read or change the module's weights.

    Data modules never do. Footplate's own callbacks say so themselves, in `sees_weights`.
    """
    if hasattr(owner, "train_dataloader") and not hasattr(owner, "training_step"):
        return False
    return getattr(owner, "sees_weights", True) or not type(owner).__module__.startswith("footplate.")


def order_of(callback: Any) -> int:
    """The position of a callback among others; see `Callback.order`."""
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
    """The number of arguments of `(batch, batch_idx, dataloader_idx)` that a step function takes.

    Raises:
        ConfigError: the function takes no argument, or the loader's iterator, which only the trainer may advance.
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
