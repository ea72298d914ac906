"""Five steps of XLA against five of eager torch, in double precision: the same weights, buffers, losses and logs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import nn

from footplate.step.xla.capture import capture_evaluation, capture_training, load_state, state_of
from footplate.step.xla.lowering import arrays_of, batch_arrays, lower, rates_of, tensors_like
from footplate.step.xla.lowering.data_parallel import data_parallel, mesh_of
from step.xla.nets import Trained, made

CLIP = 1.0


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.05)


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], float]] = {
    "sgd": (sgd, 1e-6),
    "adamw": (adamw, 1e-4),
}


def eager(module: Any, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[float]:
    """The plain loop, with a learning rate that decreases in each step."""
    losses = []
    for index, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = module.training_step(batch, index)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        _decay(optimizer)
        losses.append(loss.item())
    return losses


def compiled(
    module: Any, optimizer: torch.optim.Optimizer, batches: list[Any], devices: int = 1
) -> tuple[list[float], Any]:
    """The same training by one program. It updates module and optimizer."""
    share = tuple(tensor[: len(tensor) // devices] for tensor in batches[0])
    captured = capture_training(module, optimizer, share, gradient_clip_val=CLIP, averages=devices > 1)
    if devices == 1:
        step = jax.jit(lower(captured), donate_argnums=0)
    else:
        step = data_parallel(captured, mesh_of(jax.devices()[:devices]))
    state, losses = arrays_of(state_of(module, optimizer)), []
    for index, batch in enumerate(batches):
        given = batch_arrays(captured, batch, devices)
        state, loss, logs = step(state, rates_of(optimizer), jax.random.key(index), given)
        _decay(optimizer)
        assert float(logs["train_loss"]) == float(loss)
        losses.append(float(loss))
    load_state(module, optimizer, tensors_like(state_of(module, optimizer), state))
    if devices == 1:
        assert step._cache_size() == 1  # no other learning rate and no other batch made another program
    return losses, captured


def _decay(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error of a tensor."""
    return ((actual.double() - wanted.double()).norm() / (wanted.double().norm() + 1e-12)).item()


def worst(module: nn.Module, wanted: nn.Module) -> float:
    """Largest relative error of any tensor of a module's state.

    The bias of attention's keys is left out. It has no effect, its gradient is rounding noise, and Adam turns that into
    steps.
    """
    mine, theirs = module.state_dict(), wanted.state_dict()
    return max(
        error(mine[name], theirs[name]) for name in mine if "in_proj_bias" not in name and "qkv.bias" not in name
    )


def check(name: str, optimizer: str, devices: int = 1) -> None:
    make, tolerance = OPTIMIZERS[optimizer]
    module, batches = made(name)
    reference = copy.deepcopy(module)
    with jax.enable_x64(True):
        losses, _ = compiled(module, make(module), batches, devices)
    expected = eager(reference, make(reference), batches)
    assert losses == pytest.approx(expected, rel=tolerance)
    assert worst(module, reference) <= tolerance


pytestmark = pytest.mark.filterwarnings("ignore:.*not attached to a Trainer")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_five_steps_of_an_mlp_are_eager_torchs(optimizer):
    check("mlp", optimizer)


def test_five_steps_of_a_small_residual_network_are_eager_torchs():
    check("small_resnet", "sgd")


def test_five_steps_of_a_small_gpt_with_adamw_are_eager_torchs():
    check("gpt", "adamw")


# AdamW has attention and an MLP. What it does to a tensor doesn't depend on the rest of the network.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "encoder", "gru", "resnet"])
def test_five_steps_are_eager_torchs(name):
    check(name, "sgd")


def test_several_devices_train_as_one_with_the_whole_batch():
    module, batches = made("plain")
    reference = copy.deepcopy(module)
    with jax.enable_x64(True):
        losses, _ = compiled(module, sgd(module), batches, devices=8)
    assert losses == pytest.approx(eager(reference, sgd(reference), batches), rel=1e-6)
    assert worst(module, reference) <= 1e-6


def test_several_devices_meet_in_one_all_reduce():
    module, batches = made("mlp")
    module, batch = module.float(), (batches[0][0].float(), batches[0][1])
    optimizer = adamw(module)
    captured = capture_training(module, optimizer, tuple(tensor[:2] for tensor in batch), averages=True)
    with jax.enable_x64(False):
        step = data_parallel(captured, mesh_of(jax.devices()[:4]))
        given = (
            arrays_of(state_of(module, optimizer)),
            rates_of(optimizer),
            jax.random.key(0),
            batch_arrays(captured, batch, 4),
        )
        program = step.lower(*given).compile().as_text()
    gradients = [line for line in program.splitlines() if " all-reduce(" in line or " all-reduce-start(" in line]
    assert len(gradients) == 1


def test_an_evaluation_gives_what_eager_torch_gives():
    module, batches = made("mlp")
    captured = capture_evaluation(module, batches[0])
    with jax.enable_x64(True):
        outputs, logs = jax.jit(lower(captured))(
            arrays_of(state_of(module)), jax.random.key(0), batch_arrays(captured, batches[0])
        )
    assert module.training
    module.eval()
    expected = module.validation_step(batches[0], 0).detach()
    torch.testing.assert_close(torch.tensor(outputs[0].tolist(), dtype=torch.float64), expected)
    assert float(logs["val_loss"]) == pytest.approx(nn.functional.cross_entropy(expected, batches[0][1]).item())


def test_groups_keep_their_own_learning_rate_and_settings():
    module, batches = made("mlp")
    reference = copy.deepcopy(module)

    def groups(module: Trained) -> torch.optim.Optimizer:
        first, *rest = module.net.parameters()
        return torch.optim.Adam(
            [{"params": [first], "lr": 0.1, "betas": (0.5, 0.9)}, {"params": rest}], lr=1e-3, amsgrad=True
        )

    with jax.enable_x64(True):
        losses, _ = compiled(module, groups(module), batches)
    assert losses == pytest.approx(eager(reference, groups(reference), batches), rel=1e-6)
    assert worst(module, reference) <= 1e-4


def test_training_goes_on_in_eager_torch_where_xla_left_it():
    module, batches = made("mlp")
    reference = copy.deepcopy(module)
    optimizer, other = adamw(module), adamw(reference)
    with jax.enable_x64(True):
        compiled(module, optimizer, batches[:3])
    eager(module, optimizer, batches[3:])
    eager(reference, other, batches)
    assert worst(module, reference) <= 1e-6
    assert optimizer.state_dict()["state"].keys() == other.state_dict()["state"].keys()
    assert optimizer.state_dict()["state"][0]["step"] == other.state_dict()["state"][0]["step"] == 5
