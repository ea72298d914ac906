"""Facts about a training loader: its workers, what they do, and how busy its threads are."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from footplate.data.adapters.seeded_dataloader import SeededDataLoader
from footplate.data.adapters.wrappers import ReplayedLoader, SameEpoch, StatefulLoader
from footplate.hardware.machine import usable_cores
from footplate.monitoring.evidence import LoaderFacts


def loader_facts(loader: Any, wall_s: float) -> LoaderFacts:
    """Describe a loader.

    Args:
        loader: any iterable of batches, adapted or not.
        wall_s: the time for which it has been used.
    """
    while isinstance(loader, (SameEpoch, ReplayedLoader, StatefulLoader, SeededDataLoader)):
        loader = loader.loader
    cores = max(1, int(usable_cores()))
    if isinstance(loader, DataLoader):
        return LoaderFacts("torch", loader.num_workers, cores=cores)
    if hasattr(loader, "decodes"):
        busy = loader.busy
        return LoaderFacts(
            "table",
            loader.threads,
            min(1.0, busy.wall_s / max(1e-9, wall_s * loader.threads)),
            busy.cpu_s / busy.wall_s if busy.wall_s else None,
            tuple(loader.decodes),
            loader.transforms,
            cores,
        )
    return LoaderFacts("other", cores=cores)
