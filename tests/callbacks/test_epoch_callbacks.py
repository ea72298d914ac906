"""Callbacks that change training from an epoch on: accumulation and averaging, also after an interruption and resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.small import Classifier, loader
from torch import nn

import footplate as fp


class Normed(Classifier):
    """Has batch norm and a scheduler; records the learning rate and the step of each batch."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        if norm:
            self.net.insert(1, nn.BatchNorm1d(16))
        self.seen: list[tuple[int, float, str]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if torch.is_grad_enabled():
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            self.seen.append((self.trainer.global_step, rate, loss.item().hex()))
        return loss


class Saves(fp.Callback):
    """Saves in the middle of the run, as if the run had been killed there."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.batches == self.batches:
            trainer.save_checkpoint(trainer.run_dir / "cut.ckpt")


CALLBACKS = {
    "accumulation": lambda: fp.GradientAccumulationScheduler({1: 4, 2: 3, 3: 1}),
    "averaging": lambda: fp.StochasticWeightAveraging(0.05, 2, annealing_epochs=2),
}


@pytest.mark.parametrize("cut", [7, 15, 30, 42])
@pytest.mark.parametrize("make", CALLBACKS.values(), ids=list(CALLBACKS))
def test_a_run_resumes_bit_for_bit_wherever_it_was_cut_off(make_trainer: Any, make: Any, cut: int) -> None:
    whole = Normed()
    make_trainer(max_epochs=4, callbacks=[make(), Saves(cut)]).fit(whole, loader())
    rest, made = Normed(), make_trainer(max_epochs=4, callbacks=[make()])
    made.fit(rest, loader(), ckpt_path=made.run_dir / "cut.ckpt")
    assert rest.seen == whole.seen[cut:]
    assert all(torch.equal(value, rest.state_dict()[name]) for name, value in whole.state_dict().items())


def test_a_window_has_as_many_batches_as_its_epoch_says_and_the_run_knows_its_length(make_trainer: Any) -> None:
    class Asks(Normed):
        def configure_optimizers(self) -> Any:
            self.expected = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module, made = Asks(), make_trainer(max_epochs=4, callbacks=[CALLBACKS["accumulation"]()])
    made.fit(module, loader())
    steps = [[step for step, *_ in module.seen[12 * epoch : 12 * epoch + 12]] for epoch in range(4)]
    assert [len(set(epoch)) for epoch in steps] == [12, 3, 4, 12]
    assert made.global_step == module.expected == 31
    assert made.accumulate_grad_batches == 1


def test_the_average_ends_in_the_module_with_the_statistics_of_its_own(make_trainer: Any) -> None:
    kept: list[torch.Tensor] = []

    class Keeps(fp.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            kept.append(pl_module.net[0].weight.detach().clone())

    module, averaging = Normed(), fp.StochasticWeightAveraging(0.05, 2)
    make_trainer(max_epochs=4, callbacks=[Keeps(), averaging]).fit(module, loader(shuffle=False))
    assert averaging.n_averaged == 3
    torch.testing.assert_close(module.net[0].weight, torch.stack(kept[1:]).mean(0))
    inputs = torch.cat([module.net[0](batch[0]) for batch in loader(shuffle=False)])
    torch.testing.assert_close(module.net[1].running_mean, inputs.mean(0).detach())
    assert module.net[1].momentum == 0.1
    assert module.training


@pytest.mark.parametrize(("make", "said"), [
    (lambda: fp.GradientAccumulationScheduler({}), "expected a dict of epochs"),
    (lambda: fp.GradientAccumulationScheduler({0: 0}), "expected a dict of epochs"),
    (lambda: fp.StochasticWeightAveraging(0.0), "expected a float above 0"),
    (lambda: fp.StochasticWeightAveraging(0.1, 0), "expected an epoch, from 1"),
    (lambda: fp.StochasticWeightAveraging(0.1, 1.5), "expected an epoch, from 1"),
])  # fmt: skip
def test_arguments_that_cannot_be_are_refused(make: Any, said: str) -> None:
    with pytest.raises(fp.ConfigError, match=said):
        make()


def test_two_numbers_of_accumulated_batches_are_refused(make_trainer: Any) -> None:
    with pytest.raises(fp.ConfigError, match="remove one of them"):
        make_trainer(accumulate_grad_batches=2, callbacks=[CALLBACKS["accumulation"]()]).fit(Normed(), loader())
