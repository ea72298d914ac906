"""Logical ranks: which process computes which, and the one order in which their gradients are summed.

A run with L logical ranks cuts each global batch into L shares, whatever the number W of processes. Each process computes a
contiguous range of logical ranks. Their gradients are the leaves of a binary tree, whose shape depends on L alone:

    L = 8, W = 3                    [0 1 2 3 4 5 6 7]
                            [0 1 2 3]               [4 5 6 7]
                         [0 1]     [2 3]         [4 5]     [6 7]
                        0     1   2     3       4     5   6     7
    process             0     0   1     1       1     2   2     2

A sum of floating-point numbers depends on the order of its additions. Here each addition is a node of this tree, so the sum
has the same bits for any W. A process adds what it can: the largest nodes whose leaves are all its own (`cover`). Above,
process 0 has [0 1], process 1 has [2 3] and [4], process 2 has [5] and [6 7]. A process that has received the
nodes of all others completes the tree (`tree_sum`).

This file has pure functions of numbers. `tree_exchange.py` has the messages between the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")

# The leaves start … stop-1 below a node of the tree.
Node = tuple[int, int]


def ranks_of(process: int, processes: int, total: int) -> range:
    """Return the logical ranks of a process. The numbers of two processes differ by at most one."""
    return range(total * process // processes, total * (process + 1) // processes)


def children(node: Node) -> tuple[Node, Node]:
    """Return the two nodes whose sum a node of several leaves is. The left one has the largest possible power of two."""
    start, stop = node
    left = 1 << ((stop - start - 1).bit_length() - 1)
    return (start, start + left), (start + left, stop)


def cover(own: range, total: int) -> list[Node]:
    """Return the fewest nodes of the tree that have exactly these leaves, from left to right."""

    def below(node: Node) -> list[Node]:
        start, stop = node
        if stop <= own.start or own.stop <= start:
            return []
        if own.start <= start and stop <= own.stop:
            return [node]
        left, right = children(node)
        return below(left) + below(right)

    return below((0, total))


def merges(own: range, total: int) -> list[int]:
    """Return how many additions follow each of a process's leaves.

    The process keeps a stack of nodes. Each leaf is put on it. An addition replaces the two topmost nodes by their sum. In
    the end, the stack is `cover(own, total)`.
    """
    counts = dict.fromkeys(own, 0)

    def count(node: Node) -> None:
        if node[1] - node[0] == 1:
            return
        # The addition of two nodes is possible after the last leaf of the right one.
        counts[node[1] - 1] += 1
        for child in children(node):
            count(child)

    for node in cover(own, total):
        count(node)
    return [counts[leaf] for leaf in own]


def tree_sum(parts: Mapping[Node, T], total: int, add: Callable[[T, T], T]) -> T:
    """Sum over the whole tree.

    Args:
        parts: values of nodes that together have each leaf once.
        total: the number of leaves.
        add: adds a left and a right value.
    """

    def value(node: Node) -> T:
        if node in parts:
            return parts[node]
        left, right = children(node)
        return add(value(left), value(right))

    return value((0, total))
