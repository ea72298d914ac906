"""Collections of loaders: `CombinedLoader`, and the loaders in a dict, list or tuple.

The names and modes are Lightning's. A dict, list or tuple of loaders, nested or not, trains as `max_size_cycle` and is
evaluated as `sequential`. `CombinedLoader` names another mode. `combination.py` shows the modes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from footplate.core.errors import ConfigError
from footplate.data.adapters.combination import MODES, Build, Combination, Mode


class CombinedLoader:
    """Loaders whose batches make one batch, or follow one another.

    Iterating gives `(batch, batch_idx, dataloader_idx)`, as Lightning's class of that name does. A trainer gives the batch
    to your step.

    Args:
        iterables: a dict, list or tuple of loaders, nested or not.
        mode: "min_size" ends with the shortest loader. "max_size_cycle" ends with the longest, and begins shorter loaders
            again. "max_size" ends with the longest, and has None for loaders that have ended. "sequential" takes one
            loader after another.

    Raises:
        ConfigError: an unknown mode.

    Examples:
        >>> loader = fp.CombinedLoader({"labelled": train, "unlabelled": val}, mode="max_size_cycle")
        >>> batch, batch_idx, dataloader_idx = next(iter(loader))
        >>> sorted(batch)
        ['labelled', 'unlabelled']
    """

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        if mode not in MODES:
            raise ConfigError(f"CombinedLoader(mode={mode!r}): expected one of {', '.join(MODES)}.")
        self.iterables = iterables
        self.mode: Mode = mode

    @property
    def flattened(self) -> list[Any]:
        """The loaders, in order."""
        return flatten(self.iterables)[0]

    def __len__(self) -> int:
        leaves, build = flatten(self.iterables)
        return len(Combination(leaves, build, self.mode))

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        leaves, build = flatten(self.iterables)
        if self.mode != "sequential":
            for batch_idx, batch in enumerate(Combination(leaves, build, self.mode)):
                yield batch, batch_idx, 0
            return
        for index, leaf in enumerate(leaves):
            for batch_idx, batch in enumerate(leaf):
                yield batch, batch_idx, index


def is_combined(loader: Any) -> bool:
    """Return True for a `CombinedLoader`, ours or another library's."""
    return isinstance(loader, CombinedLoader) or any(
        kind.__name__ == "CombinedLoader" and hasattr(loader, "_mode") for kind in type(loader).__mro__
    )


def mode_of(loader: Any, default: Mode) -> Mode:
    """The mode of a `CombinedLoader`, ours or another library's; `default` for any other collection."""
    if not is_combined(loader):
        return default
    return loader.mode if isinstance(loader, CombinedLoader) else loader._mode


def holds_loaders(value: Any) -> bool:
    """Return True if a value to train on is several loaders. False for a single loader, such as a list of batches."""
    return is_combined(value) or isinstance(value, Mapping) or _any_loader(value)


def _any_loader(value: Any) -> bool:
    """Return True if there is a loader in a collection, at any depth. A batch is a collection too, but holds none."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(_is_loader(part) or _any_loader(part) for part in parts)


def _is_loader(value: Any) -> bool:
    if isinstance(value, DataLoader) or hasattr(value, "set_epoch") or is_combined(value):
        return True
    is_batch = (
        isinstance(value, (Tensor, np.ndarray, Sequence, Mapping, set)) or hasattr(value, "to") or is_dataclass(value)
    )
    return isinstance(value, Iterable) and not is_batch


def loaders_of(loaders: Any) -> list[Any]:
    """List the loaders that an evaluation runs one after another.

    Args:
        loaders: what the user gave: None, a loader, or a collection of loaders.
    """
    if loaders is None:
        return []
    if is_combined(loaders) and mode_of(loaders, "sequential") != "sequential":
        return [loaders]
    return leaves_of(loaders)


def leaves_of(loaders: Any) -> list[Any]:
    """List every single loader of a loader or a collection of loaders."""
    if isinstance(loaders, (list, tuple, Mapping)) or is_combined(loaders):
        return flatten(loaders)[0]
    return [loaders]


def flatten(loaders: Any) -> tuple[list[Any], Build]:
    """Return the loaders of a collection, and the function that builds the same collection of other values."""
    if is_combined(loaders):
        loaders = loaders.iterables
    if isinstance(loaders, (list, tuple, Mapping)):
        return _flatten_node(loaders)
    return [loaders], next


def _flatten_node(node: Any) -> tuple[list[Any], Build]:
    keys = list(node) if isinstance(node, Mapping) else range(len(node))
    children = [_flatten_node(node[key]) if _is_node(node[key]) else ([node[key]], next) for key in keys]

    def build(values: Iterator[Any]) -> Any:
        built = [build_child(values) for _, build_child in children]
        if isinstance(node, Mapping):
            return dict(zip(keys, built, strict=True))
        # A namedtuple takes its values one by one.
        return type(node)(*built) if hasattr(node, "_fields") else type(node)(built)

    return [leaf for leaves, _ in children for leaf in leaves], build


def _is_node(value: Any) -> bool:
    return not is_combined(value) and holds_loaders(value)
