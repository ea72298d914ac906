"""Memory for batches and windows that is used again, once nobody holds it any more.

Fresh memory costs a page fault for every 4 KiB, which is as much work as copying into it. So memory goes back to its pool
when the last array or tensor on it, views included, is gone: each lent array stands on a lease of its own, which numpy
and torch keep alive, and the end of the lease is what gives the memory back. A batch that is kept is simply never reused.

A request takes the free memory that fits it best. What lies free and what is lent are together never more than the most
that was ever lent at once: the windows of all streams tend to end together, and their memory is wanted again soon.

A tensor that is to be copied to a CUDA device while the host goes on needs page-locked memory, and may not be written to
before the copy is done, which nobody here can know. torch's own allocator of such memory does: it keeps what it has
locked, and hands it out again when the copies from it are over. So pinned tensors are torch's.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_SPARE = 8  # memory may be larger than asked for by an eighth, and serves a request down to half of its size

_LARGE = 256 * 1024


class Buffers:
    """A pool of memory; safe to use from several threads.

    Args:
        pin_memory: whether tensors are page-locked; without effect where there is no CUDA device.
    """

    def __init__(self, pin_memory: bool = False) -> None:
        self._pinned = pin_memory and torch.cuda.is_available()
        self._lock = threading.Lock()
        self._free: list[np.ndarray] = []
        self._idle = 0  # bytes that lie free
        self._lent = self._most = 0  # bytes lent now, and at most so far
        self._returned: deque[np.ndarray] = deque()  # the end of a lease may come at any time, so it takes no lock

    def take(self, shape: Sequence[int], dtype: Any = np.uint8) -> np.ndarray:
        """An array, its contents undefined."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        with self._lock:
            self._collect()
            memory = self._fitting(nbytes)
            if memory is None:
                memory = self._new(nbytes + nbytes // _SPARE)
            self._lent += memory.nbytes
            self._most = max(self._most, self._lent)
        lease = _Lease(memory)
        weakref.finalize(lease, self._returned.append, memory).atexit = False
        return np.asarray(lease)[:nbytes].view(dtype).reshape(shape)

    def tensor(self, shape: Sequence[int], dtype: Any = np.uint8) -> torch.Tensor:
        """A tensor, its contents undefined; its `numpy()` is the same memory."""
        if not self._pinned:
            return torch.from_numpy(self.take(shape, dtype))
        empty = torch.from_numpy(np.empty(0, dtype))
        return torch.empty(tuple(shape), dtype=empty.dtype, pin_memory=True)

    def zeros(self, shape: Sequence[int], dtype: Any) -> torch.Tensor:
        """A tensor of zeros for padding: of another shape each time, so that the allocator serves it sooner than a pool."""
        if not self._pinned:
            return torch.from_numpy(np.zeros(shape, dtype))
        return self.tensor(shape, dtype).zero_()

    def _collect(self) -> None:
        """Take in what has been given back."""
        while self._returned:
            memory = self._returned.popleft()
            self._lent -= memory.nbytes
            self._free.append(memory)
            self._idle += memory.nbytes

    def _fitting(self, nbytes: int) -> np.ndarray | None:
        """The free memory that fits best, no longer free; None when there is none."""
        fitting = [number for number, memory in enumerate(self._free) if nbytes <= memory.nbytes <= 2 * nbytes]
        return self._pop(min(fitting, key=lambda number: self._free[number].nbytes)) if fitting else None

    def _new(self, nbytes: int) -> np.ndarray:
        """New memory, in place of as much that lies free as need be, that which lay longest first."""
        most = max(self._most, self._lent + nbytes)
        while self._free and self._lent + nbytes + self._idle > most:
            self._pop(0)
        return _allocate(nbytes)

    def _pop(self, number: int) -> np.ndarray:
        memory = self._free.pop(number)
        self._idle -= memory.nbytes
        return memory


def _allocate(nbytes: int) -> np.ndarray:
    """New memory; a large piece is mapped by itself, so that the system has it back as soon as it is dropped."""
    if nbytes < _LARGE or not hasattr(mmap, "MAP_PRIVATE"):
        return np.empty(nbytes, np.uint8)
    return np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


class _Lease:
    """What stands between memory and the arrays on it. No array itself, so that no view can reach past it."""

    def __init__(self, memory: np.ndarray) -> None:
        self.__array_interface__ = memory.__array_interface__
