"""Recurrent layers, each one operation of the graph: compared with eager torch, forward and backward, in all forms."""

from __future__ import annotations

import copy
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import footplate as fp
from footplate.hardware.tpu.pitfalls import Product
from footplate.step.xla.capture import (
    Captured,
    CaptureError,
    capture_evaluation,
    capture_training,
    load_state,
    state_of,
)
from footplate.step.xla.capture.matrix_products import products_of
from footplate.step.xla.lowering import arrays_of, batch_arrays, lower, rates_of, tensors_like
from step.xla.trained import worst

pytestmark = pytest.mark.filterwarnings("ignore:.*not attached to a Trainer", "ignore:dropout option adds dropout")


class Recurrent(fp.Module):
    """Learns from all outputs of a recurrent layer."""

    def __init__(self, layer: nn.Module, **first: torch.Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.first = nn.ParameterDict(first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = tuple(self.first.values()) or None
        values, ends = self.layer(x, first[0] if first and len(first) == 1 else first)
        ends = ends if isinstance(ends, tuple) else (ends,)
        return values.square().mean() + sum((place + 2.0) * end.sin().mean() for place, end in enumerate(ends))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


def first(*shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {f"part{place}": torch.randn(shape) for place, shape in enumerate(shapes)}


FORMS = {
    "gru": lambda: Recurrent(nn.GRU(3, 4)),
    "gru, two layers both ways, batch first": lambda: Recurrent(
        nn.GRU(3, 4, 2, batch_first=True, bidirectional=True), **first((4, 5, 4))
    ),
    "lstm": lambda: Recurrent(nn.LSTM(3, 4)),
    "lstm, two layers both ways, no bias": lambda: Recurrent(
        nn.LSTM(3, 4, 2, bias=False, bidirectional=True), **first((4, 7, 4), (4, 7, 4))
    ),
    "lstm with projections": lambda: Recurrent(nn.LSTM(3, 4, proj_size=2, bidirectional=True)),
    "rnn": lambda: Recurrent(nn.RNN(3, 4, 2)),
    "rnn of relu": lambda: Recurrent(nn.RNN(3, 4, nonlinearity="relu")),
}


def captured_and_compiled(module: Any, optimizer: torch.optim.Optimizer, batch: Any, **given: Any) -> Captured:
    """One step as a program. It updates the module."""
    captured = capture_training(module, optimizer, batch, **given)
    state = arrays_of(state_of(module, optimizer))
    state, _, _ = jax.jit(lower(captured))(state, rates_of(optimizer), jax.random.key(0), batch_arrays(captured, batch))
    load_state(module, optimizer, tensors_like(state_of(module, optimizer), state))
    return captured


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1.0)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.slow] if "projections" in form else []) for form in FORMS]
)
def test_a_step_is_eager_torchs(form):
    """The batch needs no gradient. In this case torch would choose a fused layer that can't be differentiated."""
    torch.manual_seed(0)
    module = FORMS[form]().double()
    length = 2 if "projections" in form else 5  # a layer with projections is unrolled
    reference, batch = copy.deepcopy(module), (torch.randn(length, 7, 3, dtype=torch.float64),)
    with jax.enable_x64(True):
        captured = captured_and_compiled(module, sgd(module), batch)
    reference.training_step(batch, 0).backward()
    sgd(reference).step()
    assert worst(module, reference) < 1e-12
    if "projections" not in form:
        assert "aten.sigmoid.default" not in {str(node.target) for node in captured.graph.graph.nodes}


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM])
def test_an_evaluation_in_single_precision_is_eager_torchs(layer):
    module, batch = Recurrent(layer(3, 4)), (torch.randn(5, 7, 3),)
    captured = capture_evaluation(module, batch, "predict")
    with jax.enable_x64(False):
        state = arrays_of(state_of(module))
        (prediction,), _ = jax.jit(lower(captured))(state, jax.random.key(0), batch_arrays(captured, batch))
    assert float(prediction) == pytest.approx(module.predict_step(batch, 0).item(), rel=1e-5)


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RNN])
def test_mixed_precision_comes_near_to_torchs(layer):
    torch.manual_seed(0)
    module, batch = Recurrent(layer(3, 4)), (torch.randn(5, 7, 3),)
    reference = copy.deepcopy(module)
    with jax.enable_x64(False):
        captured_and_compiled(module, sgd(module), batch, precision="bf16-mixed")
    # oneDNN has no LSTM in bfloat16 for processors without AVX-512.
    with torch.autocast("cpu", torch.bfloat16), torch.backends.mkldnn.flags(enabled=False):
        loss = reference.training_step(batch, 0)
    loss.backward()
    sgd(reference).step()
    assert worst(module, reference) < 0.02


def test_the_graph_does_not_grow_with_the_length():
    sizes = set()
    for length in (4, 40):
        module = Recurrent(nn.LSTM(3, 4, 2))
        captured = capture_training(module, sgd(module), (torch.randn(length, 2, 3),))
        sizes.add(len(captured.graph.graph.nodes))
    assert len(sizes) == 1


def test_dropout_between_layers_drops():
    """All weights are one, so that the last layer's input can be computed from its output."""
    module = Recurrent(nn.RNN(1, 1, 2, bias=False, nonlinearity="relu", dropout=0.25))
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    module.predict_step = lambda batch, batch_idx: module.layer(batch[0])[0]
    module.eval = lambda: module  # so that dropout stays
    batch = (torch.ones(1, 4000, 1),)
    captured = capture_evaluation(module, batch, "predict")
    with jax.enable_x64(False):
        program = jax.jit(lower(captured))
        drawn = [
            np.asarray(program(arrays_of(state_of(module)), jax.random.key(key), batch_arrays(captured, batch))[0][0])
            for key in range(2)
        ]
    assert {round(float(value), 4) for value in np.unique(drawn[0])} == {0.0, round(1 / 0.75, 4)}
    assert np.mean(drawn[0]) == pytest.approx(1.0, abs=0.05)
    assert not np.array_equal(*drawn)


def test_packed_sequences_are_refused_with_their_line():
    class Packed(Recurrent):
        def training_step(self, batch, batch_idx):
            packed = pack_padded_sequence(batch[0], [5, 4], enforce_sorted=True)
            return self.layer(packed)[0].data.mean()

    module = Packed(nn.GRU(3, 4))
    with pytest.raises(CaptureError, match=r"shape depends on values[^$]*pack_padded_sequence\(batch\[0\]"):
        capture_training(module, sgd(module), (torch.randn(5, 2, 3),))


def test_its_products_are_counted_in_every_time_step():
    module = Recurrent(nn.GRU(3, 4))
    captured = capture_training(module, sgd(module), (torch.randn(5, 7, 3),))
    steps, of_inputs = {Product(7, 4, 12, times=5), Product(7, 12, 4, times=5)}, Product(35, 3, 12)
    assert steps | {of_inputs} <= set(products_of(captured.graph))
