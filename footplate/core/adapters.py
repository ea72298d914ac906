"""Adapters: how modules, callbacks and loggers of another training library run on Footplate's trainer.

Footplate's core names no other library. It asks this registry for the adapter of an object, and calls the adapter where
the object needs special treatment:

    footplate/__init__.py    register("lightning", "footplate.compat.lightning.adapter:ADAPTER")
    trainer.fit(module)      adapter_of(module): a base class of `module` is defined in the package `lightning`
    adapter                  imported now, the first time that it is needed
    attach                   adapter.attach_module(module, trainer)

An adapter is registered under the top-level packages whose objects it handles. Registering stores two strings, so it
costs nothing. `Adapter` below is the contract; each of its members has a default that changes nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from footplate.core.errors import ConfigError


class Adapter:
    """Interface of an adapter for another library.

    Attributes:
        name: the library's name in error texts.
        hook_bases: names of the library's base classes whose hook methods are empty.
        trainer_attributes: attributes of the library's trainer that Footplate's has not: a name, and a function that
            takes our trainer and returns the value. None means that the trainer has no such value now.
        refused_attributes: attributes of the library's trainer that don't exist here, with what to use instead.
        refused_arguments: arguments of the library's trainer that don't exist here: the value that changes nothing, and
            what to use instead.
        profilers: names that `Trainer(profiler=…)` may give, for `make_profiler`.
    """

    name: str = ""
    hook_bases: frozenset[str] = frozenset()
    trainer_attributes: Mapping[str, Callable[[Any], Any]] = {}
    refused_attributes: Mapping[str, str] = {}
    refused_arguments: Mapping[str, tuple[Any, str]] = {}
    profilers: Sequence[str] = ()

    def attach_module(self, module: Any, trainer: Any) -> None:
        """Connect one of the library's modules to our trainer. Raise ConfigError for a module that can't run."""

    def batch_outputs(self, output: Any, trainer: Any) -> Any:
        """Convert what a training step returned into what `on_train_batch_end` of the library's classes expects."""
        return output

    def translate_callbacks(self, callbacks: list[Any]) -> list[Any]:
        """Make the library's callbacks able to run here; return callbacks of others as they are.

        Raises:
            ConfigError: a callback that can't run here.
        """
        return callbacks

    def callback_groups(self) -> Sequence[str]:
        """Entry-point groups whose callbacks join every trainer while the library is imported."""
        return ()

    def is_search(self, callback: Any) -> bool:
        """Return True if a callback asks for a search (a learning rate, a batch size) before a call."""
        return False

    def search(self, trainer: Any, method: str, model: Any, loaders: Any, datamodule: Any) -> bool:
        """Run the searches that the trainer's callbacks ask for. Return True if the call should end after them."""
        return False

    def translate_logger(self, logger: Any) -> Any:
        """Wrap one of the library's loggers in a `footplate.Logger`.

        Raises:
            ConfigError: not a logger, or a logger that can't record here.
        """
        raise ConfigError(f"logger: expected a footplate.Logger, got {type(logger).__name__}.")

    def our_strategy(self, strategy: Any) -> Any:
        """Return our name, or our options, for one of the library's strategy objects.

        Raises:
            ConfigError: a strategy without a counterpart here.
        """
        raise ConfigError(f'strategy={type(strategy).__name__}(…): expected a name, such as "ddp".')

    def make_profiler(self, name: str) -> Any:
        """Make the library's profiler of a name in `profilers`."""
        return None

    def attach_profiler(self, profiler: Any, module: Any) -> None:
        """Tell one of the library's profilers which module is run."""

    def ranks_met(self, module: Any, trainer: Any) -> None:
        """Tell a module of the library, before its `setup`, that the ranks of the trainer have met."""

    def share_rank(self, rank: int) -> None:
        """Tell the library the rank of this process."""


_targets: dict[str, str] = {}
_loaded: dict[str, Adapter] = {}


class RefusedAttribute(ConfigError, AttributeError):
    """An attribute of another library's trainer that ours has not; `hasattr` returns False."""


def register(package: str, target: str) -> None:
    """Register an adapter for the objects of a top-level package.

    Args:
        package: a package such as "lightning".
        target: where the `Adapter` is, as "module:name". It is imported when it is first needed.
    """
    _targets[package] = target


def packages() -> list[str]:
    """The packages that have an adapter."""
    return list(_targets)


def adapter_of(instance: Any) -> Adapter | None:
    """The adapter of the library that defines an object's class or one of its base classes; None for no library's."""
    return next((adapter for kind in type(instance).__mro__ if (adapter := _adapter_of_class(kind)) is not None), None)


def is_adapted_base(kind: type) -> bool:
    """Return True for a base class of another library whose hook methods are empty."""
    adapter = _adapter_of_class(kind)
    return adapter is not None and kind.__name__ in adapter.hook_bases


def adapters_of(instances: Iterable[Any]) -> list[Adapter]:
    """The adapters of several objects, each once."""
    adapters = {id(adapter): adapter for instance in instances if (adapter := adapter_of(instance)) is not None}
    return list(adapters.values())


def adapters_in_use() -> list[Adapter]:
    """The adapters of the libraries that this process has imported."""
    return _load(package for package in _targets if sys.modules.get(package) is not None)


def all_adapters() -> list[Adapter]:
    """Every registered adapter. An adapter doesn't import its library."""
    return _load(_targets)


def trainer_attribute(trainer: Any, name: str) -> Any:
    """Read an attribute that an adapter adds to the trainer.

    Raises:
        RefusedAttribute: an attribute of another library's trainer that has no counterpart here.
        AttributeError: no trainer has this attribute.
    """
    if name.startswith("__"):
        raise AttributeError(f"Trainer has no attribute {name!r}.")
    adapters = all_adapters()

    known = False
    for adapter in adapters:
        read = adapter.trainer_attributes.get(name)
        value = None if read is None else read(trainer)
        if value is None and name in adapter.refused_attributes:
            raise RefusedAttribute(
                f"trainer.{name} is internal to {adapter.name} and not available here: {adapter.refused_attributes[name]}."
            )
        if value is not None:
            return value
        known = known or read is not None
    if known:
        return None

    names = {*dir(type(trainer)), *(other for adapter in adapters for other in adapter.trainer_attributes)}
    raise AttributeError(f"Trainer has no attribute {name!r}.{_nearest(name, names)}")


def _nearest(name: str, names: Iterable[str]) -> str:
    """A hint at the public name nearest to a misspelt one; empty if no name is near."""
    if name.startswith("_"):
        return ""
    # Import it here: only a mistake needs it.
    import difflib

    near = difflib.get_close_matches(name, [other for other in names if not other.startswith("_")], n=1)
    return f" Did you mean trainer.{near[0]}?" if near else " dir(footplate.Trainer) lists the attributes."


def _adapter_of_class(kind: type) -> Adapter | None:
    package = kind.__module__.partition(".")[0]
    return _load([package])[0] if package in _targets else None


def _load(packages: Iterable[str]) -> list[Adapter]:
    """Import the adapters of some packages; an adapter of several packages comes once."""
    adapters: list[Adapter] = []
    for package in packages:
        target = _targets[package]
        if target not in _loaded:
            module, _, name = target.partition(":")
            _loaded[target] = getattr(importlib.import_module(module), name)
        if _loaded[target] not in adapters:
            adapters.append(_loaded[target])
    return adapters
