"""Random operations draw from the step's key: correct moments, equal for equal keys, new for a new key."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp
from footplate.step.xla.capture import CaptureError, capture_training, state_of
from footplate.step.xla.lowering import LOWERINGS, arrays_of, batch_arrays, lower
from footplate.step.xla.lowering.arrays import array_type, to_array
from footplate.step.xla.lowering.data_parallel import data_parallel, mesh_of
from step.xla.nets import Trained
from step.xla.samples import RANDOM, aten
from step.xla.test_operations import context_for


@pytest.mark.parametrize("operation", RANDOM, ids=str)
def test_draws_have_the_right_moments(operation):
    (args, kwargs), mean, deviation = RANDOM[operation]
    expected = operation(*args, **kwargs)
    context = context_for(expected, args, lambda: jax.random.key(3), "cpu")
    given = [to_array(argument) if isinstance(argument, torch.Tensor) else argument for argument in args]
    drawn = np.asarray(LOWERINGS[operation](context, *given, **kwargs), float)
    assert drawn.shape == tuple(expected.shape)
    near = 5 * deviation / drawn.size**0.5  # five standard errors
    assert drawn.mean() == pytest.approx(mean, abs=near)
    assert drawn.std() == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_its_share_and_the_mean(p):
    x = torch.ones(200, 200)
    context = context_for(x, [x], lambda: jax.random.key(5), "cpu")
    y, kept = map(np.asarray, LOWERINGS[aten.native_dropout.default](context, to_array(x), p, True))
    assert kept.mean() == pytest.approx(1 - p, abs=5 * (p * (1 - p)) ** 0.5 / 200)
    assert np.allclose(y, kept / (1 - p))
    assert context.dtype == array_type(torch.float32)


def test_dropout_outside_of_training_or_with_p_1():
    x = torch.ones(3, 3)
    context = context_for(x, [x], lambda: jax.random.key(5), "cpu")
    dropout = LOWERINGS[aten.native_dropout.default]
    assert np.all(np.asarray(dropout(context, to_array(x), 0.5, False)[0]) == 1)
    assert np.all(np.asarray(dropout(context, to_array(x), 1.0, True)[0]) == 0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, own: torch.empty_like(x).uniform_(generator=own),
        lambda x, own: torch.empty_like(x).exponential_(1.0, generator=own),
        lambda x, own: torch.bernoulli(x, generator=own),
        lambda x, own: torch.rand(x.shape, generator=own),
        lambda x, own: nn.init.normal_(torch.empty_like(x), generator=own),
    ],
)
def test_a_generator_of_ones_own_is_refused(draw, make_trainer):
    own = torch.Generator()

    class Draws(Trained):
        def training_step(self, batch, batch_idx):
            return self.net(draw(batch[0], own)).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    with pytest.raises(CaptureError, match=r"is given a generator:\n.*test_random.py(?s:.*)Leave generator= out"):
        make_trainer(accelerator="xla", max_epochs=1).fit(
            Draws(nn.Linear(3, 1)), DataLoader(TensorDataset(torch.ones(4, 3)), 2)
        )


@pytest.mark.filterwarnings("ignore:.*not attached to a Trainer")
def test_a_steps_dropout_is_a_function_of_its_key():
    class Noise(Trained):
        def training_step(self, batch, batch_idx):
            one, other = (nn.functional.dropout(batch[0], 0.5) for _ in range(2))
            self.log("same", (one == other).float().mean())
            return (self.net(one) - 1).square().mean()

    torch.manual_seed(0)
    module = Noise(nn.Linear(6, 1))
    batch = (torch.ones(64, 6),)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    captured = capture_training(module, optimizer, batch)
    step = jax.jit(lower(captured))
    state, given = arrays_of(state_of(module, optimizer)), batch_arrays(captured, batch)
    losses = [step(state, [0.1], jax.random.key(key), given)[1].item() for key in (1, 2, 1)]
    assert losses[0] == losses[2] != losses[1]
    same = float(step(state, [0.1], jax.random.key(1), given)[2]["same"])
    assert 0.35 < same < 0.65  # two dropouts of one step draw by themselves


def test_devices_and_steps_drop_by_themselves():
    """Each weight's gradient counts the numbers of its column that dropout has kept, on all devices together."""
    p, devices, rows, columns, steps = 0.25, 8, 16, 512, 4

    class Counting(fp.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(columns))

        def training_step(self, batch, batch_idx):
            return (nn.functional.dropout(batch, p) * self.weights).sum()

    module, batch = Counting(), torch.ones(devices * rows, columns)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    captured = capture_training(module, optimizer, batch[:rows], averages=True)
    step = data_parallel(captured, mesh_of(jax.devices()[:devices]))
    state, given = arrays_of(state_of(module, optimizer)), batch_arrays(captured, batch, devices)
    weights = [np.zeros(columns)]
    for number in range(steps):
        state, _, _ = step(state, [1.0], jax.random.key(number), given)
        weights.append(np.asarray(next(iter(state.values())), float))
    kept = np.round(-np.diff(weights, axis=0) * devices * (1 - p))  # (steps, columns)
    numbers = devices * rows
    assert kept.mean() == pytest.approx(numbers * (1 - p), abs=5 * (numbers * p * (1 - p) / kept.size) ** 0.5)
    # Devices that all drew alike would have eight times a binomial's variance.
    assert kept.var() == pytest.approx(numbers * p * (1 - p), rel=5 * (2 / kept.size) ** 0.5)
    between = np.corrcoef(kept)[np.triu_indices(steps, 1)]
    assert np.abs(between).max() < 5 / columns**0.5
