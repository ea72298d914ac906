"""This machine's own peak rates, measured: no catalog has them for every processor.

Each is the best of several short tries with all the cores that this process may use, so that it is a rate which the
machine has been seen to reach: matrix products in single precision (or bfloat16), and copying within its caches, for a small
step may never leave them. About a second in all.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch


@functools.cache
def flops_per_s(dtype: torch.dtype) -> float:
    """Floating-point operations a second, in products of matrices."""
    size = 1024
    one, other = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    made = torch.empty(size, size, dtype=dtype)
    return 2 * size**3 / _fastest(lambda: torch.mm(one, other, out=made))


@functools.cache
def bytes_per_s() -> float:
    """Bytes read and written a second, by copies that stay in a cache."""
    best = 0.0
    for size in (2**14, 2**16, 2**18, 2**20):  # numbers of 4 bytes: the fastest level that copying reaches counts
        source, target = torch.ones(size), torch.empty(size)
        repeats = max(1, 2**20 // size)

        def copy(source: torch.Tensor = source, target: torch.Tensor = target, repeats: int = repeats) -> None:
            for _ in range(repeats):
                target.copy_(source)

        best = max(best, 8 * size * repeats / _fastest(copy))
    return best


def _fastest(work: Callable[[], object], tries: int = 9) -> float:
    work()
    seconds = []
    for _ in range(tries):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
