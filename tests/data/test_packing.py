"""Documents are packed into few sequences, and none of their tokens is lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.data.order.packing import PackPlan, gather_units, plan_packing

lengths_of_documents = st.lists(st.integers(0, 50), max_size=60)


def pieces_of(plan: PackPlan) -> list[tuple[int, int, int]]:
    """Document, start and length of each piece."""
    return list(zip(plan.document.tolist(), plan.start.tolist(), plan.length.tolist(), strict=True))


def sequences(plan: PackPlan) -> list[list[tuple[int, int, int]]]:
    """The pieces of each sequence."""
    return [pieces_of(plan)[first:last] for first, last in pairwise(plan.first_piece.tolist())]


@given(lengths_of_documents, st.integers(1, 20))
def test_every_token_is_in_one_place_and_no_sequence_is_too_long(lengths: list[int], size: int) -> None:
    plan = plan_packing(np.array(lengths, np.int64), size)
    tokens = [(d, token) for d, start, n in pieces_of(plan) for token in range(start, start + n)]
    assert sorted(tokens) == [(document, token) for document, n in enumerate(lengths) for token in range(n)]
    assert all(0 < sum(n for _, _, n in pieces) <= size for pieces in sequences(plan))


@given(lengths_of_documents, st.integers(1, 20))
def test_a_document_is_cut_only_where_a_sequence_is_full(lengths: list[int], size: int) -> None:
    for document, start, length in pieces_of(plan_packing(np.array(lengths, np.int64), size)):
        assert start % size == 0
        assert length == min(size, lengths[document] - start)


@given(lengths_of_documents, st.integers(1, 20))
def test_truncation_keeps_the_beginning_of_each_document(lengths: list[int], size: int) -> None:
    pieces = pieces_of(plan_packing(np.array(lengths, np.int64), size, truncate=True))
    assert sorted(pieces) == [(document, 0, min(n, size)) for document, n in enumerate(lengths) if n]


@given(lengths_of_documents, st.integers(1, 20))
def test_no_two_sequences_would_fit_into_one(lengths: list[int], size: int) -> None:
    filled = sorted(sum(n for _, _, n in pieces) for pieces in sequences(plan_packing(np.array(lengths), size)))
    assert len(filled) < 2 or filled[0] + filled[1] > size


@given(st.lists(st.integers(0, 8), max_size=60), st.integers(1, 20))
def test_documents_of_equal_length_go_where_they_would_go_one_by_one(lengths: list[int], size: int) -> None:
    used: list[int] = []
    chosen: list[tuple[int, tuple[int, int, int]]] = []
    every = [(d, start, min(size, n - start)) for d, n in enumerate(lengths) for start in range(0, n, size)]
    for piece in sorted(every, key=lambda piece: -piece[2]):
        fitting = [number for number, tokens in enumerate(used) if tokens + piece[2] <= size]
        number = max(fitting, key=lambda number: (used[number], -number), default=len(used))
        used += [0] * (number == len(used))
        used[number] += piece[2]
        chosen.append((number, piece))
    expected = [sorted(piece for sequence, piece in chosen if sequence == number) for number in range(len(used))]
    assert sequences(plan_packing(np.array(lengths, np.int64), size)) == sorted(expected)


@given(lengths_of_documents, st.integers(1, 20))
def test_sequences_and_their_documents_keep_the_order_of_the_table(lengths: list[int], size: int) -> None:
    packed = sequences(plan_packing(np.array(lengths, np.int64), size))
    firsts = [pieces[0][:2] for pieces in packed]
    assert firsts == sorted(firsts)
    assert all(pieces == sorted(pieces) for pieces in packed)


def test_a_document_goes_where_it_leaves_least_room() -> None:
    packed = sequences(plan_packing(np.array([5, 3, 8, 2, 6, 1]), 8))
    assert [[document for document, _, _ in pieces] for pieces in packed] == [[0, 1], [2], [3, 4], [5]]


def test_many_documents_leave_less_than_a_hundredth_of_padding() -> None:
    lengths = np.random.default_rng(0).integers(50, 1000, 2000)
    assert 1 - lengths.sum() / (plan_packing(lengths, 2048).num_sequences * 2048) < 0.01


@given(st.lists(st.integers(0, 6 * 2**20), max_size=40), st.sampled_from([16, 2048, 16_384]))
def test_units_are_neighbours_and_large_enough(group_bytes: list[int], size: int) -> None:
    edges = gather_units(group_bytes, size).tolist()
    assert (edges[0], edges[-1]) == (0, len(group_bytes))
    units = [sum(group_bytes[first:last]) for first, last in pairwise(edges)]
    assert len(units) <= 1 or min(units) >= max(4 * 2**20, 64 * 4 * size)


@pytest.mark.parametrize(("size", "units"), [(2048, 10), (100_000, 2)])
def test_longer_sequences_need_larger_units(size: int, units: int) -> None:
    assert len(gather_units([5 * 2**20] * 10, size)) - 1 == units
