"""ElasticSampler: divides the rest of an epoch again when the number of ranks changes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from footplate.compat.horovod.world import rank, size


class ElasticSampler(Sampler[int]):
    """Divides the rest of an epoch between the ranks. Put it into the `TorchState`; call `record_batch` after each batch.

    Args:
        dataset: only its length is used.
        shuffle: draw a random order for each epoch, the same on all ranks.
        seed: of the orders.

    Examples:
        >>> sampler = hvd.elastic.ElasticSampler(range(4), shuffle=False)
        >>> sampler.record_batch(batch_idx=0, batch_size=2)
        >>> sampler.reset()
        >>> list(sampler)
        [2, 3]
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Call it at the end of an epoch; else the next attempt skips rows of the next epoch."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch of `batch_size` rows."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the rest of the epoch between the present ranks."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        # Every rank gets the same number of rows, so a few of the first rows are repeated.
        filled = itertools.islice(itertools.cycle(self.remaining_indices), self.num_samples * self.num_replicas)
        return itertools.islice(filled, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
