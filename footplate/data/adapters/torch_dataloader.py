"""Properties of a torch DataLoader that adapters need, and copies of a loader with other attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter


def copy_loader(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """Copy a loader, with other values for some attributes.

    torch forbids to change these attributes of a loader that exists.

    Args:
        loader: the loader to copy, of any subclass.
        changed: the attributes to change.
    """
    copied: DataLoader[Any] = object.__new__(type(loader))
    vars(copied).update(vars(loader) | changed)
    return copied


def with_own_position(loader: Any) -> Any:
    """Return the same loader, such that iterating over it doesn't move `loader`.

    A torch DataLoader makes a new iterator for each `iter()`. With `persistent_workers=True` it has only one, so the loader
    is copied.
    """
    if isinstance(loader, DataLoader):
        return copy_loader(loader, _iterator=None) if loader.persistent_workers else loader
    return loader.beside() if hasattr(loader, "beside") else loader


def with_own_positions(loaders: Sequence[Any]) -> list[Any]:
    """Return the same loaders, each with a position of its own, even if a loader is in the list twice."""
    return [
        with_own_position(loader) if any(loader is earlier for earlier in loaders[:index]) else loader
        for index, loader in enumerate(loaders)
    ]


def samplers_of(loader: Any) -> list[Any]:
    """List the samplers of a DataLoader: its own, its batch sampler, and the batch sampler's. Each is listed once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    distinct = {id(sampler): sampler for sampler in samplers}
    return [sampler for sampler in distinct.values() if sampler is not None]


def announce_epoch(epoch: int, *parts: Any) -> None:
    """Call `set_epoch` of the samplers and data sets that have it, as distributed samplers do."""
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def overrides(loader: DataLoader[Any], *names: str) -> bool:
    """Return True if a subclass from outside torch and torchdata defines one of these methods."""
    owners = [next(owner for owner in type(loader).__mro__ if name in vars(owner)) for name in names]
    return any(not owner.__module__.startswith(("torch.", "torchdata.")) for owner in owners)


def iterates_itself(loader: DataLoader[Any]) -> bool:
    """Return True if a subclass runs code of its own between torch's batches and the batches that it gives."""
    return overrides(loader, "__iter__", "_get_iterator")


def has_begun(loader: DataLoader[Any]) -> bool:
    """Return True if a loader holds an iterator that it made beforehand: another sampler would come too late."""
    attributes = (value for name, value in vars(loader).items() if name != "_iterator")
    return any(isinstance(value, _BaseDataLoaderIter) for value in attributes)
