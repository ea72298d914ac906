"""`footplate.checkpoint.stored_tensor`: parts of tensors are read from safetensors files."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from footplate.checkpoint import stored_tensor
from footplate.checkpoint.stored_tensor import StoredPart, row_axis, runs, tensors_of
from footplate.core.errors import CheckpointError


@st.composite
def shapes_and_boxes(draw):
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    firsts = [draw(st.integers(0, size - 1)) for size in shape]
    return tuple(shape), [
        (first, draw(st.integers(1, size - first))) for first, size in zip(firsts, shape, strict=True)
    ]


@given(shapes_and_boxes())
def test_runs_have_the_elements_of_a_box_in_their_order(case):
    shape, box = case
    whole = torch.arange(math.prod(shape)).view(shape)
    axis, row = row_axis(shape, box)
    length = (box[axis][1] if box else 1) * row
    positions = [position for _, first in runs(shape, box, axis) for position in range(first, first + length)]
    part = whole[tuple(slice(first, first + count) for first, count in box)]
    assert positions == part.flatten().tolist()


@given(shapes_and_boxes(), st.sampled_from([1, 7, 1 << 20]))
def test_a_box_is_read_through_a_buffer_of_any_size(tmp_path_factory, case, buffer_nbytes):
    shape, box = case
    folder = tmp_path_factory.mktemp("boxes")
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    save_file({"first": torch.zeros(3), "whole": whole}, folder / "file.safetensors")
    target = torch.full([count for _, count in box], -1.0, dtype=torch.float64)
    before, stored_tensor._BUFFER_NBYTES = stored_tensor._BUFFER_NBYTES, buffer_nbytes
    try:
        tensors_of(folder, "file.safetensors")["whole"].read_into(target, [first for first, _ in box])
    finally:
        stored_tensor._BUFFER_NBYTES = before
    assert torch.equal(target, whole[tuple(slice(first, first + count) for first, count in box)].double())


def test_a_tensor_in_several_files_is_read_across_them(tmp_path):
    whole = torch.randn(5, 4)
    save_file({"part": whole[:3]}, tmp_path / "one.safetensors")
    save_file({"part": whole[3:].clone()}, tmp_path / "two.safetensors")
    one, two = (tensors_of(tmp_path, f"{name}.safetensors")["part"] for name in ("one", "two"))
    parts = (one.parts[0], replace(two.parts[0], offsets=(3, 0)))
    target = torch.empty(3, 2)
    replace(one, shape=(5, 4), parts=parts).read_into(target, (1, 2))
    assert torch.equal(target, whole[1:4, 2:])


def test_stored_tensors_are_compared_by_their_numbers(tmp_path):
    numbers = torch.randn(4, 3)
    save_file({"a": numbers, "b": numbers.clone(), "c": numbers + 1, "d": torch.tensor(3)}, tmp_path / "f.safetensors")
    tensors = tensors_of(tmp_path, "f.safetensors")
    assert tensors["a"].equals(tensors["b"])
    assert tensors["d"].equals(tensors["d"])
    assert not tensors["a"].equals(tensors["c"])


def test_a_file_that_was_cut_off_is_refused(tmp_path):
    path = tmp_path / "f.safetensors"
    save_file({"a": torch.randn(64)}, path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"f\.safetensors can't be read: .*damaged \(it has \d+ bytes instead of"):
        tensors_of(tmp_path, "f.safetensors")


def test_a_file_that_ends_while_it_is_read_is_refused(tmp_path):
    save_file({"a": torch.randn(64)}, tmp_path / "f.safetensors")
    tensor = tensors_of(tmp_path, "f.safetensors")["a"]
    part: StoredPart = replace(tensor.parts[0], start=tensor.parts[0].start + 4)
    with pytest.raises(CheckpointError, match="it ends before its last tensor"):
        replace(tensor, parts=(part,)).read_into(torch.empty(64), (0,))


def test_files_with_other_numbers_have_other_fingerprints(tmp_path):
    for name, number in (("a", 1.0), ("b", 2.0), ("c", 1.0)):
        save_file({"w": torch.full((1000,), number)}, tmp_path / name)
    a, b, c = (tensors_of(tmp_path, name)["w"].fingerprint for name in "abc")
    assert a == c != b
