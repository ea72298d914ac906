"""Programs for convolutions: on a CPU, none for which XLA has only a plain loop; elsewhere unchanged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch

from footplate.step.xla.capture import capture_training, state_of
from footplate.step.xla.lowering import LOWERINGS, arrays_of, batch_arrays, data_parallel, rates_of
from footplate.step.xla.lowering.interpret import context_for
from step.xla.nets import Trained
from step.xla.samples import aten

CASES = {
    "few pixels and many channels": ((8, 32, 2, 2), (32, 32, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    "few pixels in many rows": ((64, 4, 2, 2), (4, 4, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    "a kernel larger than its image": ((8, 4, 3, 3), (4, 4, 5, 5), ([1, 1], [2, 2], [1, 1], False, [0, 0], 1)),
    "a result larger than its image": ((2, 4, 16), (4, 4, 3), ([1], [2], [1], False, [0], 1)),
    "transposed": ((2, 4, 8, 8), (4, 4, 4, 4), ([2, 2], [1, 1], [1, 1], True, [0, 0], 1)),
    "groups": ((2, 8, 8, 8), (8, 2, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 4)),
    "each channel by itself": ((2, 8, 8, 8), (8, 1, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 8)),
}


def convolved(name, platform="cpu"):
    """A case and its gradients as a compiled function, and its arguments."""
    image, kernel, settings = CASES[name]
    x, weight = torch.zeros(image), torch.zeros(kernel)
    y = aten.convolution(x, weight, None, *settings)
    context = context_for(y, (x, weight), lambda: jax.random.key(0), platform)

    def run(x, weight, gradient):
        result = LOWERINGS[aten.convolution.default](context, x, weight, None, *settings)
        backward = LOWERINGS[aten.convolution_backward.default]
        return result, backward(context, gradient, x, weight, None, *settings, [True, True, False])

    return jax.jit(run), [jnp.asarray(tensor.numpy()) for tensor in (x, weight, y)]


@pytest.mark.parametrize("name", CASES)
def test_on_a_cpu_kernel_and_image_dont_change_places(name):
    """XLA swaps them if that makes the kernel smaller. A kernel that is read backwards shows the swap."""
    run, arrays = convolved(name)
    assert "rhs_reversal" not in str(run.lower(*arrays).compile().as_text())


def test_on_a_cpu_the_gradient_of_a_grouped_kernel_has_channels_as_groups_not_rows():
    run, arrays = convolved("groups")
    assert "batch_group_count = 4" not in run.lower(*arrays).as_text()


def test_on_a_cpu_channels_are_last_in_a_loop_too_where_xla_wouldnt_move_them():
    run, arrays = convolved("groups")
    twice = [jnp.stack([array, array]) for array in arrays]
    text = str(
        jax.jit(lambda *given: jax.lax.map(lambda arguments: run(*arguments), given)).lower(*twice).compile().as_text()
    )
    assert "dim_labels=b01f_01io->b01f" in text
    assert "dim_labels=bf01" not in text


def test_on_a_cpu_channels_by_themselves_are_sums_over_taps():
    run, arrays = convolved("each channel by itself")
    assert run.lower(*arrays).as_text().count("stablehlo.convolution") == 0


@pytest.mark.parametrize("name", CASES)
def test_for_a_tpu_a_convolution_and_its_gradients_stay_one_operation_each(name):
    run, arrays = convolved(name, "tpu")
    text = run.trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.convolution") == 3
    assert "optimization_barrier" not in text


def test_a_step_on_several_devices_has_the_convolutions_of_its_devices(monkeypatch):
    """In a plan, these devices are not those of the machine that makes it."""
    monkeypatch.setattr(data_parallel, "platform_of", lambda mesh: "tpu")
    net = torch.nn.Sequential(
        torch.nn.Conv2d(8, 8, 3, padding=1, groups=8), torch.nn.Flatten(), torch.nn.Linear(512, 3)
    )
    module = Trained(net)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    batch = (torch.zeros(2, 8, 8, 8), torch.zeros(2, dtype=torch.int64))
    captured = capture_training(module, optimizer, batch, averages=True)
    step = data_parallel.data_parallel(captured, data_parallel.mesh_of(jax.devices()[:1]))
    given = (
        arrays_of(state_of(module, optimizer)),
        rates_of(optimizer),
        jax.random.key(0),
        batch_arrays(captured, batch),
    )
    text = step.trace(*given).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.convolution") == 2  # of the first layer nobody asks for the image's gradient
