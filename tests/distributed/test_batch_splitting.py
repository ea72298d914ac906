"""Batches that are split into rows for several replicas, and outputs of the replicas, which are joined."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.errors import ConfigError
from footplate.distributed.batch_splitting import cut, joined
from footplate.distributed.buckets import moved, views
from footplate.distributed.replica_logs import Logged, together

CPU = torch.device("cpu")
Point = namedtuple("Point", "x y")


@dataclass
class Example:
    pixels: torch.Tensor
    name: str


@given(st.integers(0, 40), st.integers(1, 9))
def test_pieces_are_the_rows_in_their_order_as_equal_as_can_be(rows, count):
    whole = torch.arange(rows)
    pieces = cut(whole, count)
    assert torch.equal(torch.cat([piece.batch for piece in pieces]), whole)
    sizes = [piece.rows for piece in pieces]
    assert [len(piece.batch) for piece in pieces] == sizes
    assert max(sizes) - min(sizes) <= 1
    assert len(pieces) == max(1, min(rows, count))
    assert sum(piece.share for piece in pieces) == pytest.approx(1.0)


def test_whatever_holds_the_tensors_is_kept_and_what_has_no_rows_is_the_same_for_all():
    rows = torch.arange(3)
    batch: dict[str, Any] = {
        "image": rows, "names": ["a", "b", "c"], "pair": Point(rows, rows), "list": [rows, {"deep": rows}],
        "example": Example(rows, "all"), "array": np.arange(3), "ordered": OrderedDict(x=rows),
        "scale": 0.5, "text": "abc", "none": None, "zero": torch.tensor(7), "size": (224, 224),
    }  # fmt: skip
    first, second = (piece.batch for piece in cut(batch, 2))
    assert first["image"].tolist() == [0, 1]
    assert second["names"] == ["c"]
    assert isinstance(first["pair"], Point)
    assert first["pair"].y.tolist() == [0, 1]
    assert second["list"][1]["deep"].tolist() == [2]
    assert (second["example"].pixels.tolist(), second["example"].name) == ([2], "all")
    assert second["array"].tolist() == [2]
    assert (type(second["ordered"]), second["ordered"]["x"].tolist()) == (OrderedDict, [2])
    for name in ("scale", "text", "none", "zero", "size"):
        assert first[name] is second[name] is batch[name]


class Moves:
    def to(self, device: Any) -> Any: ...


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (["a", "b"], "no tensor in it"),
        (torch.tensor(1), "no tensor in it"),
        ([torch.zeros(3), torch.zeros(2, 5)], r"the shape \(2, 5\), where the first has 3 rows"),
        ([torch.zeros(3), Moves()], "a Moves in it doesn't say what its rows are"),
        ([torch.zeros(3), [{"boxes": torch.zeros(2, 4)}] * 3], r"the shape \(2, 4\)"),
    ],
)
def test_a_batch_whose_rows_are_not_plain_is_refused(batch, said):
    with pytest.raises(ConfigError, match=said):
        cut(batch, 2)


def test_outputs_become_those_of_the_whole_batch():
    pieces = cut(torch.zeros(4), 3)  # 2 + 1 + 1 rows
    outputs = [
        {"loss": torch.tensor(float(n)), "rows": torch.full((piece.rows,), n), "name": n}
        for n, piece in enumerate(pieces)
    ]
    whole = joined(outputs, pieces, CPU)
    assert whole["loss"] == 0.75
    assert whole["rows"].tolist() == [0, 0, 1, 2]
    assert whole["name"] == [0, 1, 2]
    assert joined([{"loss": torch.ones(1), "one": torch.ones(1)}] * 3, pieces, CPU)["one"].shape == (3,)
    assert joined([None, None, None], pieces, CPU) is None
    assert joined([None, torch.tensor(4.0), None], pieces, CPU) == 1.0


def logged(name: str, value: Any, reduce_fx: Any = "mean", batch_size: int | None = None) -> Logged:
    return Logged(name, value, False, None, None, None, reduce_fx, False, True, batch_size)


@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(1, 5)), min_size=1, max_size=5), st.booleans())
def test_logged_values_become_one_by_their_reduction(pairs, tensors):
    values, rows = [value for value, _ in pairs], [count for _, count in pairs]

    def of(reduce_fx: str) -> float:
        calls = [[logged("x", torch.tensor(value) if tensors else value, reduce_fx)] for value in values]
        (call,) = together(calls, rows, CPU)
        return float(call.value)

    assert of("mean") == pytest.approx(sum(v * n for v, n in pairs) / sum(rows), abs=1e-5)
    assert of("sum") == pytest.approx(sum(values), abs=1e-4)
    assert (of("min"), of("max")) == pytest.approx((min(values), max(values)))


def test_names_that_only_some_copies_log_count_their_own_rows():
    calls = together([[logged("a", 1.0), logged("a", 5.0)], [logged("b", 2.0), logged("a", 4.0)]], [2, 1], CPU)
    assert [(call.name, call.batch_size) for call in calls] == [("a", 3), ("a", 2), ("b", 1)]
    assert [call.value for call in calls] == pytest.approx([2.0, 5.0, 2.0])


def test_a_batch_size_that_is_given_is_the_weight():
    (call,) = together([[logged("a", 1.0, batch_size=1)], [logged("a", 5.0, batch_size=3)]], [8, 8], CPU)
    assert (call.value, call.batch_size) == (4.0, 4)


@given(st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=5))
def test_a_flat_bucket_is_taken_apart_into_the_tensors_it_was_made_of(shapes):
    tensors = [torch.randn(shape) for shape in shapes]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    assert all(torch.equal(one, other) for one, other in zip(views(flat, tensors), tensors, strict=True))
    assert [tensor.shape for tensor in moved(tensors, torch.device("meta"))] == [tensor.shape for tensor in tensors]
    assert moved(tensors, CPU) is tensors
