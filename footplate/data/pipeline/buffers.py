"""A pool of memory for batches and windows. Memory is used again when its last array is gone.

New memory costs a page fault for every 4 KiB, which is as much work as copying into it. So memory goes back to its pool
when the last array or tensor on it, views included, is gone. Each array that is taken is a view of a lease, an object
that numpy and torch keep alive. The end of the lease gives the memory back. A batch that is kept is never reused.

A request takes the free memory that fits it best. Free memory and memory in use together never exceed the peak of memory in
use. The windows of all streams tend to end together, and their memory is needed again soon.

A tensor that is copied to a CUDA device in the background needs page-locked memory, and may not be written to before
the copy has finished. Only torch's own allocator of such memory knows when that is. It keeps the memory that it has
locked, and hands it out again when the copies from it have finished. So pinned tensors are torch's.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# New memory is larger than the request by 1 / 8. It later serves requests down to half of its size.
_SPARE_SHARE = 8

_LARGE_BYTES = 256 * 1024


class Buffers:
    """A pool of memory; safe to use from several threads.

    Args:
        pin_memory: True for page-locked tensors. It has no effect without a CUDA device.
    """

    def __init__(self, pin_memory: bool = False) -> None:
        self._pinned = pin_memory and torch.cuda.is_available()
        self._lock = threading.Lock()
        self._free: list[np.ndarray] = []
        self._free_bytes = 0
        self._used_bytes = self._peak_bytes = 0
        # A lease may end at any time, even while this thread holds the lock. So its end only appends to this queue.
        self._returned: deque[np.ndarray] = deque()

    def take(self, shape: Sequence[int], dtype: Any = np.uint8) -> np.ndarray:
        """Return an array with undefined contents."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            self._collect()
            memory = self._fitting(nbytes)
            if memory is None:
                memory = self._new(nbytes + nbytes // _SPARE_SHARE)
            self._used_bytes += memory.nbytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        lease = _Lease(memory)
        weakref.finalize(lease, self._returned.append, memory).atexit = False
        return np.asarray(lease)[:nbytes].view(dtype).reshape(shape)

    def tensor(self, shape: Sequence[int], dtype: Any = np.uint8) -> torch.Tensor:
        """Return a tensor with undefined contents. Its `numpy()` is the same memory."""
        if not self._pinned:
            return torch.from_numpy(self.take(shape, dtype))
        empty = torch.from_numpy(np.empty(0, dtype))
        return torch.empty(tuple(shape), dtype=empty.dtype, pin_memory=True)

    def zeros(self, shape: Sequence[int], dtype: Any) -> torch.Tensor:
        """Return a tensor of zeros for padding. Its shape differs each time, so the allocator is faster than a pool."""
        if not self._pinned:
            return torch.from_numpy(np.zeros(shape, dtype))
        return self.tensor(shape, dtype).zero_()

    def _collect(self) -> None:
        """Take back the memory whose leases have ended."""
        while self._returned:
            memory = self._returned.popleft()
            self._used_bytes -= memory.nbytes
            self._free.append(memory)
            self._free_bytes += memory.nbytes

    def _fitting(self, nbytes: int) -> np.ndarray | None:
        """Take the free memory that fits best; None if there is none."""
        fitting = [number for number, memory in enumerate(self._free) if nbytes <= memory.nbytes <= 2 * nbytes]
        return self._pop(min(fitting, key=lambda number: self._free[number].nbytes)) if fitting else None

    def _new(self, nbytes: int) -> np.ndarray:
        """Allocate memory. To stay within the peak, drop free memory first, the oldest first."""
        limit = max(self._peak_bytes, self._used_bytes + nbytes)
        while self._free and self._used_bytes + nbytes + self._free_bytes > limit:
            self._pop(0)
        return _allocate(nbytes)

    def _pop(self, number: int) -> np.ndarray:
        memory = self._free.pop(number)
        self._free_bytes -= memory.nbytes
        return memory


def _allocate(nbytes: int) -> np.ndarray:
    """Allocate memory. A large piece gets a mapping of its own, so that the system has it back when it is dropped."""
    if nbytes < _LARGE_BYTES or not hasattr(mmap, "MAP_PRIVATE"):
        return np.empty(nbytes, np.uint8)
    return np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


class _Lease:
    """The owner of the arrays on a piece of memory. It isn't an array itself, so that no view can bypass it."""

    def __init__(self, memory: np.ndarray) -> None:
        self.__array_interface__ = memory.__array_interface__
