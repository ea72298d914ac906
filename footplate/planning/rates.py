"""Peak rates of the machine that plans, measured: no catalog has them for every processor.

What one core reaches at its best in many very short tries, so short that a busy machine doesn't get between, times the
cores that this process may use: products of matrices in the precision that is planned, and copies within a core's caches,
for a small step may never leave them. Products are tried with all that torch has for them, since on some processors one
library is twice as fast as another. Cores rarely scale that well, and memory never: what follows from it is a bound.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from footplate.hardware.machine import usable_cores

TRIES = 200


@functools.cache
def flops_per_s(dtype: torch.dtype) -> float:
    """Floating-point operations a second, in products of matrices."""
    size = 256
    one, other = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    made = torch.empty(size, size, dtype=dtype)
    ways: list[Callable[[], object]] = [lambda: torch.mm(one, other, out=made)]
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        blocked = one.to_mkldnn()
        ways.append(lambda: torch.ops.aten.mkldnn_linear(blocked, other))
    with _one_core():
        return usable_cores() * 2 * size**3 / min(map(_fastest, ways))


@functools.cache
def bytes_per_s() -> float:
    """Bytes read and written a second, by copies that stay in a cache; the fastest cache counts."""
    sizes = (2**12, 2**14, 2**16, 2**18)  # numbers of 4 bytes
    with _one_core():
        return usable_cores() * max(8 * size / _fastest(_copying(size)) for size in sizes)


def _copying(size: int) -> Callable[[], object]:
    source, target = torch.ones(size), torch.empty(size)
    return lambda: target.copy_(source)


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(TRIES):
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
