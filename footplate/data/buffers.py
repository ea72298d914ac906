"""Memory for batches that is used again, once nobody holds the batch any more.

Fresh memory costs a page fault for every 4 KiB, which for images is as much work as copying them. So a batch's memory
goes back to its pool when the last tensor on it, views included, is gone: a tensor made by `torch.from_numpy` keeps its
array alive, and the end of that array is what gives the memory back. A batch that is kept is simply never reused.
"""

from __future__ import annotations

import weakref
from collections import defaultdict

import numpy as np
import torch

_KEPT = 16


class Buffers:
    """A pool of uint8 tensors of the shapes that have been asked for."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, ...], list[np.ndarray]] = defaultdict(list)

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A uint8 tensor, its contents undefined."""
        free = self._free[shape]
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(shape, np.uint8)
        lent = memory.view()
        weakref.finalize(lent, _give_back, free, memory).atexit = False
        return torch.from_numpy(lent)


def _give_back(free: list[np.ndarray], memory: np.ndarray) -> None:
    if len(free) < _KEPT:
        free.append(memory)
