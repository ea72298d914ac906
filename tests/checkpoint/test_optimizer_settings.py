"""A training that begins from a checkpoint: its settings are its own, and what training has made is the checkpoint's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from footplate.checkpoint.optimizer_settings import keep_own_settings, settings_of
from footplate.core.errors import CheckpointError
from footplate.step.optimizers import SchedulerConfig

Make = Callable[[torch.optim.Optimizer, float], Any]


def chain(optimizer: torch.optim.Optimizer, rate: float) -> Any:
    warm_up = lr_scheduler.LinearLR(optimizer, rate, total_iters=5)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=rate / 100)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [5])


def both(optimizer: torch.optim.Optimizer, rate: float) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, rate, 4), lr_scheduler.ExponentialLR(optimizer, 1 - rate / 10)]
    return lr_scheduler.ChainedScheduler(parts)


SCHEDULERS: dict[str, Make] = {
    "lambda": lambda optimizer, rate: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) * rate / 4)),
    "step": lambda optimizer, rate: lr_scheduler.StepLR(optimizer, 3, rate),
    "cosine": lambda optimizer, rate: lr_scheduler.CosineAnnealingLR(optimizer, 7, rate / 50),
    "restarts": lambda optimizer, rate: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2, rate / 50),
    "one cycle": lambda optimizer, rate: lr_scheduler.OneCycleLR(optimizer, rate, total_steps=40),
    "cyclic": lambda optimizer, rate: lr_scheduler.CyclicLR(optimizer, rate / 10, rate, 4),
    "polynomial": lambda optimizer, rate: lr_scheduler.PolynomialLR(optimizer, 30, rate),
    "chain": chain,
    "both": both,
}


def made(
    lr: float, momentum: float, decay: float, make: Make | None, rate: float = 0.5, tensor: bool = False
) -> tuple[torch.optim.Optimizer, list[SchedulerConfig]]:
    """An optimizer with two groups, the second with settings of its own."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0, "name": "head"}]
    rate_of = torch.tensor(lr, dtype=torch.float64) if tensor else lr
    optimizer = torch.optim.SGD(groups, lr=rate_of, momentum=momentum, weight_decay=decay)
    return optimizer, [] if make is None else [SchedulerConfig(make(optimizer, rate), interval="step")]


def trained(optimizer: torch.optim.Optimizer, schedulers: list[SchedulerConfig], steps: int) -> dict[str, Any]:
    """Train for some steps. Returns the part of the checkpoint that is about optimizers."""
    own = settings_of(optimizer)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.full((2,), 1.0 + step)
        optimizer.step()
        for config in schedulers:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config.scheduler.step()
    return {
        "optimizer_settings": [own],
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [config.scheduler.state_dict() for config in schedulers],
    }


def begin(
    optimizer: torch.optim.Optimizer, schedulers: list[SchedulerConfig], state: dict[str, Any], steps: int
) -> None:
    own = settings_of(optimizer)
    optimizer.load_state_dict(state["optimizer_states"][0])
    keep_own_settings(state, "base.ckpt", [optimizer], [own], schedulers, [steps] * len(schedulers))


VALUES = st.tuples(st.floats(1e-4, 1.0), st.sampled_from([0.5, 0.85, 0.9]), st.sampled_from([0.0, 0.1]))


@settings(deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULERS)), VALUES, VALUES, st.floats(0.1, 0.9), st.floats(0.1, 0.9), st.integers(0, 30)
)
def test_a_training_that_begins_has_the_settings_of_one_that_trained_with_its_own_from_the_first_step(
    name: str, base: tuple[float, ...], own: tuple[float, ...], base_rate: float, own_rate: float, steps: int
):
    make = SCHEDULERS[name]
    state = trained(*made(*base, make, base_rate), steps)
    reference, reference_schedulers = made(*own, make, own_rate)
    trained(reference, reference_schedulers, steps)
    optimizer, schedulers = made(*own, make, own_rate)
    begin(optimizer, schedulers, state, steps)
    assert settings_of(optimizer) == settings_of(reference)
    assert schedulers[0].scheduler.get_last_lr() == reference_schedulers[0].scheduler.get_last_lr()
    # It goes on as the reference does.
    trained(reference, reference_schedulers, 5)
    trained(optimizer, schedulers, 5)
    assert settings_of(optimizer) == settings_of(reference)


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_a_learning_rate_in_a_tensor_is_brought_there_too(name: str):
    state = trained(*made(0.1, 0.9, 0.1, SCHEDULERS[name], tensor=True), 9)
    reference, reference_schedulers = made(0.3, 0.9, 0.1, SCHEDULERS[name], tensor=True)
    trained(reference, reference_schedulers, 9)
    optimizer, schedulers = made(0.3, 0.9, 0.1, SCHEDULERS[name], tensor=True)
    begin(optimizer, schedulers, state, 9)
    rates = [[float(group["lr"]) for group in each.param_groups] for each in (optimizer, reference)]
    assert rates[0] == rates[1]


def test_without_a_scheduler_the_settings_are_its_own_and_the_moments_those_of_the_checkpoint():
    base, _ = made(0.1, 0.9, 0.1, None)
    state = trained(base, [], 3)
    optimizer, _ = made(0.2, 0.5, 0.01, None)
    begin(optimizer, [], state, 3)
    first, second = optimizer.param_groups
    assert (first["lr"], first["momentum"], first["weight_decay"]) == (0.2, 0.5, 0.01)
    assert (second["lr"], second["momentum"], second["weight_decay"], second["name"]) == (0.2, 0.5, 0.0, "head")
    moments, expected = (each.state[each.param_groups[0]["params"][0]] for each in (optimizer, base))
    assert torch.equal(moments["momentum_buffer"], expected["momentum_buffer"])


def test_a_value_that_training_has_changed_stays_unless_it_is_configured_otherwise():
    base, _ = made(0.1, 0.9, 0.1, None)
    own = settings_of(base)
    # By hand, and a count that an optimizer keeps in its groups.
    base.param_groups[0].update(lr=0.03, momentum=0.7, count=5)
    state = {"optimizer_settings": [own], "optimizer_states": [base.state_dict()], "lr_schedulers": []}
    optimizer, _ = made(0.1, 0.5, 0.1, None)
    begin(optimizer, [], state, 0)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["count"]) == (0.03, 0.5, 5)


@pytest.mark.parametrize(("lr", "expected"), [(0.1, 0.1 * 0.5 * 0.5), (0.4, 0.4 * 0.25)])
def test_a_plateau_keeps_its_counts_and_reduces_as_it_was_reduced(lr: float, expected: float):
    def plateau(optimizer: torch.optim.Optimizer, rate: float) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=rate, patience=1)

    base, schedulers = made(0.1, 0.9, 0.0, plateau)
    own = settings_of(base)
    for value in (1.0, 2.0, 2.0, 2.0, 2.0, 2.0):
        schedulers[0].scheduler.step(value)
    state = {
        "optimizer_settings": [own],
        "optimizer_states": [base.state_dict()],
        "lr_schedulers": [schedulers[0].scheduler.state_dict()],
    }
    optimizer, configs = made(lr, 0.9, 0.0, plateau, rate=0.1)
    begin(optimizer, configs, state, 0)
    course = configs[0].scheduler
    assert [group["lr"] for group in optimizer.param_groups] == [expected] * 2 == course.get_last_lr()
    assert (course.best, course.num_bad_epochs, course.factor) == (1.0, 1, 0.1)


@pytest.mark.parametrize(
    ("base", "own", "steps", "message"),
    [
        ("cosine", "cosine", 4, "would have made 4 steps by now, and in the checkpoint it has made 3"),
        ("cosine", "plateau", 3, "one of both depends on a metric"),
        ("cosine", "short", 3, "can't make the 3 steps of the checkpoint: Tried to step 3 times"),
        ("cosine", "foreign", 3, "can't repeat the steps of the checkpoint's training, since it isn't one of torch"),
    ],
)
def test_a_scheduler_that_cannot_be_brought_to_the_step_of_the_checkpoint_is_refused(
    base: str, own: str, steps: int, message: str
):
    class Foreign:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    others: dict[str, Make] = {
        **SCHEDULERS,
        "plateau": lambda optimizer, rate: lr_scheduler.ReduceLROnPlateau(optimizer),
        "short": lambda optimizer, rate: lr_scheduler.OneCycleLR(optimizer, rate, total_steps=2),
        "foreign": lambda optimizer, rate: Foreign(optimizer),
    }
    state = trained(*made(0.1, 0.9, 0.0, others[base]), 3)
    optimizer, schedulers = made(0.1, 0.9, 0.0, others[own])
    with pytest.raises(CheckpointError, match=message):
        begin(optimizer, schedulers, state, steps)


def test_two_schedulers_of_one_optimizer_are_refused():
    optimizer, schedulers = made(0.1, 0.9, 0.0, SCHEDULERS["cosine"])
    schedulers.append(SchedulerConfig(SCHEDULERS["step"](optimizer, 0.5)))
    state = trained(optimizer, schedulers, 3)
    with pytest.raises(CheckpointError, match="SGD has 2 learning-rate schedulers"):
        begin(optimizer, schedulers, state, 3)


def test_a_checkpoint_that_does_not_tell_its_settings_is_refused():
    optimizer, _ = made(0.1, 0.9, 0.0, None)
    state = trained(optimizer, [], 3)
    del state["optimizer_settings"]
    with pytest.raises(CheckpointError, match=r"base\.ckpt doesn't tell how its optimizers were configured"):
        begin(optimizer, [], state, 3)


def test_groups_that_were_added_in_training_are_refused():
    base, _ = made(0.1, 0.9, 0.0, None)
    state = trained(base, [], 3)
    base.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    state["optimizer_states"] = [base.state_dict()]
    optimizer, _ = made(0.1, 0.9, 0.0, None)
    own = settings_of(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    optimizer.load_state_dict(state["optimizer_states"][0])
    with pytest.raises(
        CheckpointError, match="2 parameter groups at the beginning of its training, 3 in the checkpoint"
    ):
        keep_own_settings(state, "base.ckpt", [optimizer], [own], [], [])
