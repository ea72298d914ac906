"""The learning rate at each size: the rules, the warm-up, and trainers that keep their schedules on another scale."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp
from footplate.callbacks.ambient import everywhere
from footplate.core.errors import ConfigError
from footplate.scaling import learning_rate
from footplate.scaling.learning_rates import Rate, check_rule, factor, in_force
from footplate.scaling.study_callbacks import Pace

DATA = DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=1)  # 8 steps an epoch


class Recorder(fp.Module):
    """Records the rate of each step."""

    def __init__(self, schedule=None, lr=0.1):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.schedule, self.lr = schedule, lr
        self.used: list[list[float]] = []

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        groups = [{"params": [self.layer.weight]}, {"params": [self.layer.bias], "lr": self.lr / 2}]
        optimizer = SGD(groups, lr=self.lr)
        optimizer.register_step_post_hook(
            lambda stepped, *_: self.used.append([group["lr"] for group in stepped.param_groups])
        )
        if self.schedule is None:
            return optimizer
        scheduler = self.schedule(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


SCHEDULES = {
    "none": None,
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 16),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, [0.01, 0.01], [0.1, 0.1], step_size_up=4, cycle_momentum=False
    ),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [0.1, 0.05], total_steps=17, cycle_momentum=False
    ),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [4],
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}  # fmt: skip


def used(make_trainer, rate: Rate | None, schedule=None) -> torch.Tensor:
    """The rates of 16 steps: (step, parameter group)."""
    module = Recorder(schedule)
    with everywhere(*([] if rate is None else [Pace(rate)])):
        make_trainer(enable_checkpointing=False).fit(module, DATA)
    return torch.tensor(module.used, dtype=torch.float64)


def test_the_rules():
    assert [factor(rule, 4) for rule in ("linear", "sqrt", "none")] == [4.0, 2.0, 1.0]


@given(st.floats(1, 64), st.floats(0.1, 10), st.floats(0, 20), st.floats(1e-5, 10))
def test_a_rate_grows_along_a_line_from_that_of_one_process_to_the_full_one(by, warmup, epoch, own):
    rate = Rate(by, warmup)
    assert math.isclose(rate.at(own, 0.0), own)
    assert math.isclose(rate.at(own, warmup), by * own)
    assert rate.at(own, epoch) <= rate.at(own, epoch + 0.1) * (1 + 1e-12)
    assert math.isclose(rate.at(own, warmup / 2), own * (1 + by) / 2)
    assert rate.at(own) == by * own


def test_a_base_takes_the_place_of_the_trainings_own():
    assert Rate(2.0, base=0.3).at(0.1) == 0.6


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_stays_what_it_was_on_another_scale(make_trainer, schedule):
    own, scaled = used(make_trainer, None, schedule), used(make_trainer, Rate(4.0), schedule)
    assert own.shape == (16, 2)
    torch.testing.assert_close(scaled, 4 * own)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_the_warm_up_leaves_no_trace_in_the_schedule(make_trainer, schedule):
    own, scaled = used(make_trainer, None, schedule), used(make_trainer, Rate(4.0, warmup=1.0), schedule)
    ramp = torch.tensor([1 + 3 * step / 8 for step in range(8)] + [4.0] * 8, dtype=torch.float64)
    torch.testing.assert_close(scaled, ramp[:, None] * own)


def test_groups_keep_their_ratio_to_a_given_base(make_trainer):
    rates = used(make_trainer, Rate(2.0, base=0.3))
    torch.testing.assert_close(rates, torch.tensor([[0.6, 0.3]] * 16, dtype=torch.float64))


def test_outside_a_study_a_rate_is_what_it_is():
    assert learning_rate(0.1) == learning_rate(0.1, epoch=3.0) == 0.1


def test_code_that_asks_for_its_rate_sees_to_it_itself(make_trainer):
    class Asking(Recorder):
        def configure_optimizers(self):
            return SGD(self.parameters(), lr=learning_rate(0.1))

    module = Asking()
    with in_force(Rate(2.0)), everywhere(Pace(Rate(2.0))):
        make_trainer(enable_checkpointing=False, max_epochs=1).fit(module, DATA)
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.2


def test_a_training_that_continues_from_a_checkpoint_is_refused(make_trainer):
    make_trainer().fit(Recorder(), DATA)
    with everywhere(Pace(Rate())), pytest.raises(ConfigError, match=r"continues from a checkpoint \(step 16\)"):
        make_trainer(max_epochs=4).fit(Recorder(), DATA, ckpt_path="last")


def test_a_warm_up_needs_to_know_how_long_an_epoch_is(make_trainer):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield torch.zeros(1)

    with everywhere(Pace(Rate(2.0, warmup=1.0))), pytest.raises(ConfigError, match="warmup=0"):
        make_trainer().fit(Recorder(), DataLoader(Endless()))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("liner", None, None), 'Did you mean "linear"'),
        (("linear", 0.0, None), "lr=0.0"),
        (("linear", None, -1), "warmup=-1"),
        (("none", None, 2.0), "nothing to warm up to"),
    ],
)
def test_what_can_not_be_is_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        check_rule(*arguments)


def test_only_the_linear_rule_warms_up_by_itself():
    assert [check_rule(rule, None, None)[2] for rule in ("linear", "sqrt", "none")] == [1.0, 0.0, 0.0]
