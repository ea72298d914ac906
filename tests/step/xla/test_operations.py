"""Every operation of the table against eager torch: shapes, types, values."""

from __future__ import annotations

import operator
from typing import Any

import jax
import pytest
import tables
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from footplate.step.xla.capture import capture_training
from footplate.step.xla.capture.state import state_of
from footplate.step.xla.lowering import (
    LOWERINGS,
    MissingOperation,
    arrays_of,
    batch_arrays,
    lower,
    missing_ops,
    rates_of,
    tensors_like,
)  # fmt: skip
from footplate.step.xla.lowering.arrays import to_array, to_tensor, value_type
from footplate.step.xla.lowering.interpret import conformed, context_for
from footplate.step.xla.lowering.table import COMPLEX, lowering_of
from step.xla.nets import Trained
from step.xla.samples import RANDOM, SAMPLES, UNDEFINED, Draw, Sample, aten

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2}


def lowered(operation: Any, samples: list[Sample], key: Any = None) -> list[tuple[Any, Any]]:
    """Results of torch and of the table for each sample. All samples are one program, to save time."""
    expected = [_listed(operation(*args, **kwargs)) for args, kwargs in samples]
    function = lowering_of(operation)
    assert function is not None
    leaves, tree = pytree.tree_flatten(samples)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def run(*given: Any) -> Any:
        filled = list(leaves)
        for place, array in zip(places, given, strict=True):
            filled[place] = array
        results = []
        for (args, kwargs), (operands, _), wanted in zip(
            pytree.tree_unflatten(filled, tree), samples, expected, strict=True
        ):
            context = context_for(wanted[0] if isinstance(wanted, list) else wanted, operands, lambda: key, "cpu")
            results.append(conformed(str(operation), function(context, *args, **kwargs), wanted))
        return results

    program = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})
    return list(zip(expected, program(*[to_array(leaves[place]) for place in places]), strict=True))


def _listed(result: Any) -> Any:
    return list(result) if isinstance(result, (tuple, list)) else result


def compare(operation: Any, expected: Any, actual: Any) -> None:
    for wanted, array in zip(*map(pytree.tree_leaves, (expected, actual)), strict=True):
        if wanted is None or array is None:
            assert wanted is None or array is None
            continue
        assert tuple(array.shape) == tuple(wanted.shape)
        assert array.dtype == value_type(wanted.dtype)
        got = to_tensor(array, wanted.dtype)
        if wanted.is_floating_point() or wanted.is_complex():
            scale = TOLERANCE[wanted.dtype.to_real()]
            torch.testing.assert_close(got, wanted, rtol=scale, atol=scale, equal_nan=True)
        else:
            assert torch.equal(got, wanted), str(operation)


def test_every_operation_has_samples():
    ours = torch.ops.footplate
    # Dropout has its tests in test_random, and the operations of several devices have theirs with trainers.
    elsewhere = {aten.native_dropout.default, operator.getitem, ours.average.default, ours.extreme.default}
    lowered = {str(operation) for operation in LOWERINGS}
    tried = {str(operation) for operation in (*SAMPLES, *UNDEFINED, *RANDOM, *elsewhere)}
    missing, without = sorted(lowered - tried), sorted(tried - lowered)
    assert not missing, f"give these operations samples in tests/step/xla/samples.py: {missing}"
    assert not without, f"these samples are of operations that have no lowering: {without}"


@pytest.mark.parametrize("operation", SAMPLES, ids=str)
def test_the_operation_gives_what_torch_gives(operation):
    with jax.enable_x64(True):
        # Compiling is most of the work, so only each third sample is computed in single precision, too.
        single, double = (
            [sample for make in SAMPLES[operation] for sample in make(Draw(str(operation), dtype))]
            for dtype in (torch.float32, torch.float64)
        )
        samples = [*single[::3], *double]
        for expected, actual in lowered(operation, samples):
            compare(operation, expected, actual)


def test_every_operation_for_complex_numbers_has_a_sample_with_some():
    def has_complex(operation):
        makes = [*SAMPLES.get(operation, []), *([UNDEFINED[operation]] if operation in UNDEFINED else [])]
        samples = [sample for make in makes for sample in make(Draw(str(operation), torch.float32))]
        values = pytree.tree_leaves([samples, [operation(*args, **kwargs) for args, kwargs in samples]])
        return any(isinstance(value, torch.Tensor) and value.is_complex() for value in values)

    assert [str(operation) for operation in COMPLEX if not has_complex(operation)] == []


@pytest.mark.parametrize("operation", UNDEFINED, ids=str)
def test_an_uninitialised_tensor_has_torchs_shape_and_type(operation):
    for expected, actual in lowered(operation, UNDEFINED[operation](Draw(str(operation), torch.float32))):
        assert tuple(actual.shape) == tuple(expected.shape)
        assert actual.dtype == value_type(expected.dtype)


HALF = [
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.exp.default,
    aten.gelu.default,
    aten._softmax.default,
    aten.mm.default,
    aten.native_layer_norm.default,
    aten.sum.dim_IntList,
]


@pytest.mark.parametrize("operation", HALF, ids=str)
def test_half_precision_comes_near_to_torchs(operation):
    samples = [sample for make in SAMPLES[operation] for sample in make(Draw(str(operation), torch.bfloat16))]
    for expected, actual in lowered(operation, samples):
        compare(operation, expected, actual)


@settings(max_examples=6, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_binary_operations_broadcast_and_promote_as_torchs(sizes, data):
    dtypes = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16])
    masks = [data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))) for _ in range(2)]
    draw = Draw(str(sizes), torch.float32)
    one, other = (
        draw.i(*(size if keep else 1 for size, keep in zip(sizes, mask, strict=True))).to(data.draw(dtypes))
        for mask in masks
    )
    other = torch.where(other == 0, torch.ones_like(other), other)  # XLA makes 0 of False / 0, where torch makes NaN
    samples = [((one, other), {})]
    for operation in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.lt.Tensor, aten.eq.Tensor):
        for expected, actual in lowered(operation, samples):
            compare(operation, expected, actual)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_slices_of_any_bounds_are_torchs(data):
    bounds = st.none() | st.integers(-7, 7)
    sample = (
        (torch.arange(30.0).reshape(5, 6), data.draw(st.integers(-2, 1)), data.draw(bounds), data.draw(bounds)),
        {},
    )
    samples = [((*sample[0], step), {}) for step in (1, 2)]
    for expected, actual in lowered(aten.slice.Tensor, samples):
        compare(aten.slice.Tensor, expected, actual)


def test_an_operation_without_a_lowering_is_named_with_its_place_before_anything_is_compiled():
    class Distances(Trained):
        def training_step(self, batch, batch_idx):
            return torch.cdist(self.net(batch[0]), batch[0]).mean()

    module = Distances(nn.Linear(3, 3))
    captured = capture_training(
        module, torch.optim.SGD(module.parameters(), lr=0.1), (torch.randn(4, 3), torch.zeros(4))
    )
    missing = missing_ops(captured.graph)
    lines = {operation.name: operation.where for operation in missing}
    assert lines["aten._cdist_forward.default"].endswith("return torch.cdist(self.net(batch[0]), batch[0]).mean()")
    assert lines["aten._cdist_backward.default"] == ""
    with pytest.raises(MissingOperation, match=r"Distances\.training_step needs[^$]*_cdist_forward"):
        lower(captured)


class Fourier(Trained):
    """Layers as in FNet, in spectrograms and in Fourier neural operators, one after the other."""

    def __init__(self, net):
        super().__init__(net)
        self.filter = nn.Parameter(torch.randn(3, 2))

    def training_step(self, batch, batch_idx):
        mixed = torch.fft.fftn(self.net(batch[0]), dim=(0, 1)).real
        bands = torch.stft(mixed, n_fft=8, hop_length=4, window=torch.hann_window(8), return_complex=True)
        kept = torch.zeros_like(bands[:, :, 0])
        kept[:, :3] = bands[:, :3].sum(2) * torch.view_as_complex(self.filter)
        turned = kept * torch.polar(torch.ones(5), torch.arange(5.0))
        return torch.fft.irfft(turned, n=8).square().mean() + (bands.abs() + 1e-3).log().mean()


def test_a_step_with_fourier_transforms_has_torchs_loss_and_gradients():
    torch.manual_seed(0)
    module, batch = Fourier(nn.Linear(16, 16)), (torch.randn(4, 16), torch.zeros(4))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    captured = capture_training(module, optimizer, batch)
    state = arrays_of(state_of(module, optimizer))
    state, loss, _ = jax.jit(lower(captured))(
        state, rates_of(optimizer), jax.random.key(0), batch_arrays(captured, batch)
    )

    expected = module.training_step(batch, 0)
    expected.backward()
    optimizer.step()
    torch.testing.assert_close(torch.tensor(float(loss)), expected.detach())
    trained = tensors_like(state_of(module, optimizer), state)
    for path, tensor in state_of(module, optimizer).items():
        torch.testing.assert_close(trained[path], tensor, rtol=1e-4, atol=1e-5)


def test_an_operation_that_is_not_entered_for_complex_numbers_is_missing_for_them():
    class Powers(Trained):
        def training_step(self, batch, batch_idx):
            return torch.fft.fft(self.net(batch[0])).exp().abs().mean()

    module = Powers(nn.Linear(3, 3))
    captured = capture_training(
        module, torch.optim.SGD(module.parameters(), lr=0.1), (torch.randn(4, 3), torch.zeros(4))
    )
    (missing,) = missing_ops(captured.graph)
    assert missing.name == "aten.exp.default of complex numbers"
    assert missing.where.endswith("return torch.fft.fft(self.net(batch[0])).exp().abs().mean()")
    with pytest.raises(MissingOperation, match=r"Powers\.training_step needs[^$]*exp\.default of complex numbers"):
        lower(captured)


def test_the_page_lists_the_table():
    text = tables.OPERATIONS.read_text()
    assert text == tables.with_operations(text), "run `make tables`"
