"""Threads, worker processes and page-locked memory of any loader, adapted or not."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from footplate.data.adapters.combination import Combination
from footplate.data.adapters.logical_loader import LogicalLoader
from footplate.data.adapters.seeded_dataloader import SeededDataLoader
from footplate.data.adapters.torch_dataloader import iterates_itself
from footplate.data.adapters.wrappers import ReplayedLoader, SameEpoch, StatefulLoader


def pin_for(loader: Any, device: torch.device) -> None:
    """Let a `footplate.data.Loader` make its batches in page-locked memory if they go to CUDA.

    A `pin_memory=` that the user has set stays.

    Args:
        loader: any iterable of batches.
        device: the device that the batches go to.
    """
    if getattr(loader, "pin_memory", False) is None:
        loader.pin_memory = device.type == "cuda"


def end_workers(loader: Any) -> None:
    """End the worker processes that a torch DataLoader with `persistent_workers=True` keeps between epochs.

    Args:
        loader: any iterable of batches, adapted or not, whose iteration has ended.
    """
    while isinstance(loader, (SameEpoch, ReplayedLoader, StatefulLoader, SeededDataLoader)):
        loader = loader.loader
    if isinstance(loader, LogicalLoader):
        for part in loader.loaders:
            end_workers(part)
    elif isinstance(loader, Combination):
        for part in loader.parts:
            end_workers(part)
    elif isinstance(loader, DataLoader) and isinstance(loader._iterator, _MultiProcessingDataLoaderIter):
        iterator, loader._iterator = loader._iterator, None
        iterator._shutdown_workers()


def made_in_background(loader: Any) -> bool:
    """Return True if any thread may take the batches: they are ready, or the loader's threads or processes make them.

    Otherwise, taking a batch runs code of the loader's author in the thread that takes it. This code may draw from the
    generators that a step draws from too.

    Args:
        loader: any iterable of batches, adapted or not.
    """
    is_drawn = False
    while isinstance(loader, (SameEpoch, ReplayedLoader, SeededDataLoader)):
        is_drawn = isinstance(loader, SeededDataLoader) and not loader.endless
        loader = loader.loader
    if isinstance(loader, Combination):
        return all(map(made_in_background, loader.parts))
    if isinstance(loader, DataLoader):
        samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
        by_torch = not iterates_itself(loader) and (is_drawn or all(map(_draws_only_at_start, samplers)))
        return loader.num_workers > 0 and by_torch
    return hasattr(loader, "rank_rows") or type(loader) in (list, tuple)


def _draws_only_at_start(sampler: Any) -> bool:
    """Return True if a sampler draws from global generators only when it begins, as torch's samplers do."""
    return sampler is None or type(sampler).__module__.startswith("torch.utils.data.")
