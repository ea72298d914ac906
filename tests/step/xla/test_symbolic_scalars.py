"""Numbers that change from step to step: inputs of the program, or conditions that choose the program."""

from __future__ import annotations

import builtins
import logging
import math
import operator
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.small import loader
from torch import nn
from torch.nn import functional as F

import footplate as fp
from footplate.step.xla.capture import Captured, CaptureError, capture_evaluation, capture_training
from footplate.step.xla.capture.arithmetic import Number, Present, pythons_functions
from footplate.step.xla.capture.symbolic_scalars import Counters
from footplate.step.xla.runtime import program_cache
from step.xla.trained import Steady, equal, worst

pytestmark = pytest.mark.filterwarnings("ignore:.*not attached to a Trainer")


class At:
    """A module at some point of its training."""

    def __init__(self, step: int, epoch: int = 0) -> None:
        self.global_step, self.current_epoch = step, epoch


def counter(step: int = 7) -> Number:
    return Counters(Present(At(step)), torch.float32).number("global_step")


# Arithmetic

ONE = ["operator.neg", "builtins.abs", "builtins.round", "math.exp", "math.tanh", "math.sqrt", "math.floor", "np.cos"]
TWO = ["operator.add", "operator.sub", "operator.mul", "operator.truediv", "operator.floordiv", "operator.mod"]
TWO += ["builtins.min", "builtins.max", "math.fmod"]


def calculation(steps: list[Any], number: Any) -> Any:
    """Apply some functions, looked up by name at the call, to a number."""
    owners = {"operator": operator, "builtins": builtins, "math": math, "np": np}
    for name, *rest in steps:
        owner, function = name.split(".")
        other, first = rest or (None, False)
        operands = [number] if other is None else [other, number] if first else [number, other]
        number = getattr(owners[owner], function)(*operands)
    return number


ALONE, PAIR = st.sampled_from(ONE), st.tuples(st.sampled_from(TWO), st.sampled_from([2, -3, 0.25, 10]), st.booleans())


@given(st.lists(st.tuples(ALONE) | PAIR, max_size=5), st.integers(0, 40), st.integers(0, 40))
def test_a_number_is_what_python_computes_of_the_counter_at_any_later_step(steps, now, later):
    try:
        wanted = [calculation(steps, at) for at in (now, later)]
    except (ValueError, ZeroDivisionError, OverflowError):
        return  # Python itself has no answer
    with pythons_functions():
        number = calculation(steps, counter(now))
    assert number.value == wanted[0]
    assert number.now(Present(At(later))) == wanted[1]
    assert isinstance(number.value, int) is isinstance(wanted[0], int)


@pytest.mark.parametrize(
    "use",
    [float, int, str, hash, repr, range, "abc".__getitem__, lambda n: f"{n}", lambda n: divmod(n, 2), np.asarray, list],
)
def test_every_other_use_is_refused(use):
    with pytest.raises(CaptureError, match=r"self\.global_step is used in a step that is captured once"):
        use(counter(2))


def test_python_gets_its_functions_back():
    functions = min, max, math.exp
    with pytest.raises(ZeroDivisionError), pythons_functions():
        min(1, 1 / counter(0))
    assert (min, max, math.exp) == functions


def test_a_comparison_is_a_decision_that_holds_as_long_as_its_answer():
    counters = Counters(Present(At(7)), torch.float32)
    step = counters.number("global_step")
    assert step < 10
    assert step % 2 == 1
    assert step != None  # noqa: E711  what is no number is no question
    counted = counters.counted
    assert [counted.broken(Present(At(now))) is None for now in (1, 2, 9, 11)] == [True, False, True, False]
    assert "assert step % 2 == 1 (a number made of self.global_step was True)" in str(counted.broken(Present(At(2))))


# In a step


class Tiny(fp.Module):
    """Computes its given function."""

    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.compute = compute

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1]) * self.compute(self, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("beta", self.compute(self, batch_idx))


BATCH = (torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))


def captured(compute: Any) -> Captured:
    module = Tiny(compute)
    return capture_training(module, torch.optim.SGD(module.parameters(), lr=0.1), BATCH)


@pytest.mark.parametrize(
    ("compute", "inputs"),
    [
        (lambda self, batch_idx: 2.0, 0),
        (lambda self, batch_idx: self.current_epoch, 1),
        (lambda self, batch_idx: min(1.0, self.global_step / 100), 1),
        (lambda self, batch_idx: torch.tensor(0.5 ** (batch_idx + 1)), 1),
        (lambda self, batch_idx: torch.where(torch.ones(()) > 0, self.global_step, self.current_epoch), 2),
        (lambda self, batch_idx: torch.ones(()).mul(1 / (1 + math.exp(-self.global_step))).pow(batch_idx), 2),
        (lambda self, batch_idx: 3 - self.global_step * torch.ones(()) ** self.global_step, 2),
    ],
)
def test_a_number_that_meets_a_tensor_is_an_input(compute, inputs):
    step = captured(compute)
    assert len(step.counted.numbers) == inputs
    assert step.rates == 1 + inputs
    assert len(step.graph.graph.find_nodes(op="placeholder")) == len(step.paths) + step.rates + len(BATCH)


REFUSED = {
    "a text": lambda self, batch_idx: len(f"{self.current_epoch}"),
    "a tensor's index": lambda self, batch_idx: torch.ones(3)[self.current_epoch],
    "an index": lambda self, batch_idx: [1.0, 2.0][self.current_epoch],
    "float": lambda self, batch_idx: float(self.global_step),
    "dropout": lambda self, batch_idx: F.dropout(torch.ones(3), self.global_step / 100).sum(),
    "metrics": lambda self, batch_idx: self.trainer.callback_metrics["loss"],
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_asks_for_its_value_is_refused_with_its_line(kind, make_trainer):
    compute = REFUSED[kind]
    module = Tiny(compute)
    module.trainer = make_trainer()
    with pytest.raises(CaptureError, match=r"captured once|captured step can't know") as refused:
        capture_training(module, torch.optim.SGD(module.parameters(), lr=0.1), BATCH)
    assert f"test_symbolic_scalars.py:{compute.__code__.co_firstlineno}:" in str(refused.value)


def test_a_number_that_is_kept_in_an_attribute_is_refused_and_taken_out():
    class Keeping(Tiny):
        def training_step(self, batch, batch_idx):
            self.beta = min(1.0, self.global_step / 10)
            return super().training_step(batch, batch_idx) * self.beta

    module = Keeping(lambda self, batch_idx: 1.0)
    with pytest.raises(CaptureError, match=r"self\.beta: .*self\.beta = min\(1\.0"):
        capture_training(module, torch.optim.SGD(module.parameters(), lr=0.1), BATCH)
    assert not hasattr(module, "beta")


def test_a_fraction_in_the_place_of_an_integer_is_another_program():
    step = captured(lambda self, batch_idx: max(0, 1 - self.global_step / 4))
    at = capture_evaluation(
        Tiny(lambda self, batch_idx: max(0, 1 - self.global_step / 4)), BATCH, present=Present(At(5))
    )
    assert step.counted.broken(Present(At(5))) is None  # a float that is 0 is still one
    assert at.counted.broken(Present(At(6))) is None
    assert at.counted.broken(Present(At(2))) is not None


def test_a_trainers_attributes_decide_and_its_counters_are_numbers(make_trainer):
    module = Tiny(lambda self, batch_idx: self.trainer.global_step / self.trainer.max_epochs)
    module.trainer = make_trainer(max_epochs=2)
    capture = capture_training(module, torch.optim.SGD(module.parameters(), lr=0.1), BATCH)
    assert len(capture.counted.numbers) == 1
    assert capture.counted.broken(Present(module)) is None
    module.trainer.max_epochs = 3
    assert "(self.trainer.max_epochs was 2)" in str(capture.counted.broken(Present(module)))


# In training


class Warmed(Steady):
    """Weighs its loss by hand: a warm-up, a logistic annealing, the epoch and the batch's index."""

    def training_step(self, batch, batch_idx):
        beta = min(1.0, (1 + self.global_step) / 6)
        annealed = 1 / (1 + math.exp(-0.5 * (self.trainer.global_step - 4)))
        self.log("beta", beta)
        self.log("epoch_in_step", self.current_epoch)
        return super().training_step(batch, batch_idx) * beta + annealed * 0.1 * self.net[0].weight.square().sum() * (
            0.5**self.current_epoch + batch_idx
        )

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if not self.trainer.sanity_checking:
            self.log("val_epoch", self.current_epoch + batch_idx)


def fitted(make_trainer, kind, **given):
    torch.manual_seed(0)
    model = kind()
    torch.manual_seed(0)
    trainer = make_trainer(**{"precision": "64-true", "log_every_n_steps": 1, **given})
    trainer.fit(model, loader(80), loader(20, shuffle=False))
    return trainer


def trained(made: fp.Trainer) -> list[Any]:
    return [compilation for compilation in made.step.compilations if "training_step" in compilation.name]


@pytest.mark.parametrize(("devices", "window"), [(1, 1), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_annealing_by_hand_is_that_of_eager_torch_by_one_program(devices, window, make_trainer):
    wanted, compiled = (
        fitted(
            make_trainer,
            Warmed,
            accelerator=name,
            devices=devices if name == "xla" else 1,
            accumulate_grad_batches=window,
        )
        for name in ("cpu", "xla")
    )
    assert worst(compiled.module, wanted.module) < 1e-12
    mine, theirs = compiled.callback_metrics, wanted.callback_metrics
    assert {name: float(mine[name]) for name in theirs} == pytest.approx({name: float(theirs[name]) for name in theirs})
    assert float(mine["val_epoch"]) == 1.5
    assert len(trained(compiled)) == (1 if window == 1 else 2)


def test_steps_of_one_call_are_each_given_their_own_numbers(make_trainer):
    one, several = (fitted(make_trainer, Warmed, accelerator="xla", iterations_per_loop=steps) for steps in (1, 4))
    assert equal(dict(one.module.state_dict()), dict(several.module.state_dict()))
    assert {made.steps for made in trained(several)} == {4}
    assert equal(one.callback_metrics, several.callback_metrics)


class Chooses(Steady):
    """Trains differently from the second epoch on, and in every third batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch >= 1:
            loss = loss * 0.5
        if batch_idx % 3 == 2:
            self.log("third", loss)
            loss = loss + self.net[0].weight.square().sum()
        return loss


def test_a_step_that_decides_by_a_counter_has_a_program_for_each_way(make_trainer, caplog):
    wanted = fitted(make_trainer, Chooses, accelerator="cpu")
    with caplog.at_level(logging.WARNING, "footplate"):
        compiled = fitted(make_trainer, Chooses, accelerator="xla", iterations_per_loop=2)
    assert worst(compiled.module, wanted.module) < 1e-12
    assert float(compiled.callback_metrics["third"]) == pytest.approx(float(wanted.callback_metrics["third"]))
    assert len([compilation for compilation in trained(compiled) if compilation.steps == 1]) == 4
    assert re.search(
        r"since it goes another way now at .*if self\.current_epoch >= 1: \(.*epoch was False\)", caplog.text
    )


class Wavers(Steady):
    def training_step(self, batch, batch_idx):
        number = 0
        while self.global_step != number:
            number += 1
        return super().training_step(batch, batch_idx) * number


@pytest.mark.slow
def test_a_step_that_takes_another_way_each_time_is_refused(make_trainer, monkeypatch):
    monkeypatch.setattr(program_cache, "MOST_WAYS", 3)
    with pytest.raises(
        fp.ConfigError, match=r"compiled 3 times for batches of one form[^$]*self\.global_step != number"
    ):
        fitted(make_trainer, Wavers, accelerator="xla")


class ByHand(Steady):
    """Steps twice in a batch, and reads the count of steps after each."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx) / (1 + self.global_step)
            self.manual_backward(loss)
            optimizer.step()
        self.log("steps", self.global_step)
        return loss


def test_steps_that_are_made_by_hand_count_at_once(make_trainer):
    wanted, compiled = (fitted(make_trainer, ByHand, accelerator=name, max_epochs=1) for name in ("cpu", "xla"))
    assert worst(compiled.module, wanted.module) < 1e-12
    assert float(compiled.callback_metrics["steps"]) == float(wanted.callback_metrics["steps"]) == 16
