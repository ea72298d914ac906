"""A pass over the row groups of a table before its first batch: to select rows, to measure them, or to count sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_READERS = 4
# Over a network, most of the readers wait for the server.
_REMOTE_READERS = 16


def scan_groups(read: Callable[[int], T], groups: Iterable[int], is_remote: bool) -> Iterator[T]:
    """Yield what a function returns for each row group, in order. Several threads call it.

    Args:
        read: reads a row group. The results of all row groups may be in memory together, so they should be small.
        groups: the numbers of the row groups.
        is_remote: True if they are read over a network.
    """
    with ThreadPoolExecutor(_REMOTE_READERS if is_remote else _READERS, "footplate-scan") as pool:
        yield from pool.map(read, groups)
