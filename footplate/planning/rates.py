"""Peak rates of the machine that plans, measured: no catalog has them for every processor.

Each is the best of several short tries with all the cores that this process may use, so that it is a rate which the
machine has been seen to reach: matrix products in the precision that is planned, and copying within its caches, for a
small step may never leave them. About a second in all.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from footplate.hardware.machine import usable_cores


@functools.cache
def flops_per_s(dtype: torch.dtype) -> float:
    """Floating-point operations a second, in products of matrices."""
    size = 1024
    one, other = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    made = torch.empty(size, size, dtype=dtype)
    with _all_cores():
        return 2 * size**3 / _fastest(lambda: torch.mm(one, other, out=made))


@functools.cache
def bytes_per_s() -> float:
    """Bytes read and written a second, by copies that stay in a cache; the fastest cache counts."""
    sizes = (2**14, 2**16, 2**18, 2**20)  # numbers of 4 bytes
    with _all_cores():
        return max(8 * size / _fastest(_copying(size)) for size in sizes)


def _copying(size: int) -> Callable[[], object]:
    source, target = torch.ones(size), torch.empty(size)
    return lambda: target.copy_(source)


def _fastest(work: Callable[[], object], tries: int = 30) -> float:
    seconds = []
    for _ in range(tries):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


@contextmanager
def _all_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, int(usable_cores())))
    try:
        yield
    finally:
        torch.set_num_threads(before)
