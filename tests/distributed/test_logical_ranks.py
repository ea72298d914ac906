"""The ranges and the tree of logical ranks, as pure functions of numbers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from footplate.distributed.logical_ranks import children, cover, merges, ranks_of, tree_sum

TOTALS = st.integers(1, 70)


@st.composite
def sizes(draw):
    """A number of logical ranks, and of processes."""
    total = draw(TOTALS)
    return total, draw(st.integers(1, total))


def as_written(left: str, right: str) -> str:
    """A sum as text, which shows the order of its additions."""
    return f"({left}+{right})"


def whole(total: int) -> str:
    """The sum of one process."""
    return tree_sum({(leaf, leaf + 1): str(leaf) for leaf in range(total)}, total, as_written)


@given(sizes())
def test_processes_have_contiguous_ranges_of_almost_the_same_size(size):
    total, processes = size
    ranges = [ranks_of(process, processes, total) for process in range(processes)]
    assert list(itertools.chain(*ranges)) == list(range(total))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    assert min(map(len, ranges)) >= 1


@given(sizes())
def test_every_number_of_processes_adds_in_the_same_order(size):
    total, processes = size
    parts = {}
    for process in range(processes):
        own = ranks_of(process, processes, total)
        stack: list[str] = []
        for leaf, additions in zip(own, merges(own, total), strict=True):
            stack.append(str(leaf))
            for _ in range(additions):
                right = stack.pop()
                stack.append(as_written(stack.pop(), right))
        # The stack holds one sum for each node of the cover.
        parts |= dict(zip(cover(own, total), stack, strict=True))
    assert tree_sum(parts, total, as_written) == whole(total)


@given(sizes())
def test_a_process_sends_few_nodes(size):
    total, processes = size
    for process in range(processes):
        nodes = cover(ranks_of(process, processes, total), total)
        assert len(nodes) <= max(1, 2 * (total - 1).bit_length() - 1)
        if total & (total - 1) == 0 and processes & (processes - 1) == 0:
            assert len(nodes) == 1


@given(TOTALS)
def test_the_left_side_of_a_node_is_the_largest_power_of_two_below_it(total):
    if total == 1:
        return
    (start, middle), (same, stop) = children((0, total))
    assert (start, same, stop) == (0, middle, total)
    assert middle & (middle - 1) == 0
    assert middle < total <= 2 * middle


def test_the_order_of_eight_leaves_on_three_processes():
    assert whole(8) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert [cover(ranks_of(process, 3, 8), 8) for process in range(3)] == [
        [(0, 2)], [(2, 4), (4, 5)], [(5, 6), (6, 8)]
    ]  # fmt: skip
