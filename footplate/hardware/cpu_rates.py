"""Peak rates of this machine's CPU, measured, because no catalog has them for every processor.

A rate is the best of many very short tries on one core, times the cores that this process may use. The tries are so short
that other processes rarely interrupt them. They are matrix products in the planned precision, and copies within a core's
caches, because a small step may never leave these. Products are tried with each library of torch, because on some
processors one is twice as fast as another. Cores rarely scale that well, and memory never does, so the rates are bounds.

A processor without instructions for bfloat16 takes a hundred times as long for a product, so the tries end after a tenth of
a second, too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from footplate.hardware.machine import usable_cores

TRIES = 200
# The tries end after this time, but not before a few of them.
TIME_S = 0.1
FEW_TRIES = 3


@functools.cache
def flops_per_s(dtype: torch.dtype) -> float:
    """Measure floating-point operations per second, in matrix products."""
    size = 256
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    product = torch.empty(size, size, dtype=dtype)
    libraries: list[Callable[[], object]] = [lambda: torch.mm(left, right, out=product)]
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        blocked = left.to_mkldnn()
        libraries.append(lambda: torch.ops.aten.mkldnn_linear(blocked, right))
    with _one_core():
        return usable_cores() * 2 * size**3 / min(map(_fastest, libraries))


@functools.cache
def bytes_per_s() -> float:
    """Measure bytes read and written per second, by copies within a cache; the fastest cache counts."""
    # Counts of float32 numbers.
    sizes = (2**12, 2**14, 2**16, 2**18)
    with _one_core():
        return usable_cores() * max(8 * size / _fastest(_copying(size)) for size in sizes)


def _copying(size: int) -> Callable[[], object]:
    source, target = torch.ones(size), torch.empty(size)
    return lambda: target.copy_(source)


def _fastest(work: Callable[[], object]) -> float:
    seconds: list[float] = []
    while len(seconds) < TRIES and (len(seconds) < FEW_TRIES or sum(seconds) < TIME_S):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


@contextmanager
def _one_core() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
