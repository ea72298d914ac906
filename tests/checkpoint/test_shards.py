"""Parts of tensors: joined again regardless of the cuts, or refused."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from footplate.checkpoint.format.shards import Shards, put_together
from footplate.checkpoint.format.statefile import Sharded
from footplate.core.errors import CheckpointError


def files(whole: torch.Tensor, rows: list[int], columns: list[int]) -> list[Shards]:
    """A matrix cut at these rows and columns, one file for each part."""
    shards = []
    for top, bottom in zip([0, *rows], [*rows, len(whole)], strict=True):
        for left, right in zip([0, *columns], [*columns, whole.shape[1]], strict=True):
            part = whole[top:bottom, left:right]
            shards.append(Shards({"w": part}, {"w": [top, left]}) if part.numel() else Shards())
    return shards


def read(shards: list[Shards], shape: tuple[int, ...] = (7, 5)) -> torch.Tensor:
    state = {"a": [{"b": Sharded("w", torch.float32, shape)}], "c": 3}
    whole = put_together(state, [(shard.parts, shard.notes()) for shard in shards], "a.ckpt", "cpu")
    assert whole["c"] == 3
    return whole["a"][0]["b"]


MATRIX = torch.arange(35.0).view(7, 5)


@given(
    st.lists(st.integers(0, 7), max_size=4).map(sorted),
    st.lists(st.integers(0, 5), max_size=3).map(sorted),
    st.randoms(use_true_random=False),
)
def test_a_tensor_cut_anywhere_is_put_together_in_any_order(rows, columns, random):
    parts = files(MATRIX, rows, columns)
    random.shuffle(parts)
    assert torch.equal(read(parts), MATRIX)


@given(st.integers(0, 2))
def test_without_one_of_its_parts_it_is_refused(missing):
    parts = files(MATRIX, [2, 5], [])
    del parts[missing]
    with pytest.raises(CheckpointError, match=r"a\.ckpt is damaged: its shards don't make up w"):
        read(parts)


def test_a_part_that_several_ranks_have_counts_once():
    parts = files(MATRIX, [3], [])
    assert torch.equal(read([*parts, parts[0]]), MATRIX)
    with pytest.raises(CheckpointError, match="don't make up w"):
        read([parts[0], parts[0]])


@pytest.mark.parametrize(
    "wrong",
    [
        Shards({"w": MATRIX}, {"w": [1, 0]}),
        Shards({"w": MATRIX}, {"w": [-1, 0]}),
        Shards({"w": MATRIX.view(-1)}, {"w": [0]}),
        Shards({"w": MATRIX.double()}, {"w": [0, 0]}),
        Shards({}, {"w": [0, 0]}),
    ],
)
def test_a_part_that_does_not_fit_is_refused(wrong):
    with pytest.raises(CheckpointError, match=r"w is damaged: a shard doesn't fit"):
        read([wrong])


@pytest.mark.parametrize("notes", [{}, {"DCP_SHARDING_INFO": "{"}, {"DCP_SHARDING_INFO": json.dumps({"w": 3})}])
def test_a_file_that_does_not_say_where_its_parts_belong_is_refused(notes):
    with pytest.raises(CheckpointError, match="lacks the offsets of its parts"):
        put_together({"b": Sharded("w", torch.float32, (1,))}, [({}, notes)], "a.ckpt", "cpu")
