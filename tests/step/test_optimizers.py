"""Return values of `configure_optimizers`, valid and invalid."""

from __future__ import annotations

import pytest
import torch
from models.small import Classifier, loader
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import footplate as fp
from footplate.step.optimizers import configure, may_use_closure, wants_closure


class Returns(Classifier):
    """Returns the result of a function of two optimizers."""

    def __init__(self, form) -> None:
        super().__init__()
        self.form = form

    def configure_optimizers(self):
        first = torch.optim.SGD(self.net[0].parameters(), lr=0.1)
        second = torch.optim.Adam(self.net[3].parameters(), lr=0.2)
        return self.form(first, second)


FORMS = {
    "nothing": (lambda a, b: None, 0, []),
    "one optimizer": (lambda a, b: a, 1, []),
    "a list": (lambda a, b: [a, b], 2, []),
    "a tuple": (lambda a, b: (a, b), 2, []),
    "two lists": (lambda a, b: ([a, b], [StepLR(a, 1)]), 2, [("epoch", 1, None)]),
    "two lists, the second empty": (lambda a, b: ([a], []), 1, []),
    "a list and one scheduler": (lambda a, b: ([a], StepLR(a, 1)), 1, [("epoch", 1, None)]),
    "a dict": (lambda a, b: {"optimizer": a}, 1, []),
    "a dict with a scheduler": (lambda a, b: {"optimizer": a, "lr_scheduler": StepLR(a, 1)}, 1, [("epoch", 1, None)]),
    "a dict with settings": (
        lambda a, b: {"optimizer": a, "lr_scheduler": {"scheduler": StepLR(a, 1), "interval": "step", "frequency": 3}},
        1,
        [("step", 3, None)],
    ),
    "a monitor beside the optimizer": (
        lambda a, b: {"optimizer": a, "lr_scheduler": ReduceLROnPlateau(a), "monitor": "val_loss"},
        1,
        [("epoch", 1, "val_loss")],
    ),
    "a monitor beside the scheduler": (
        lambda a, b: {"optimizer": a, "lr_scheduler": {"scheduler": ReduceLROnPlateau(a), "monitor": "val_loss"}},
        1,
        [("epoch", 1, "val_loss")],
    ),
    "two dicts": (
        lambda a, b: ({"optimizer": a, "lr_scheduler": StepLR(a, 1)}, {"optimizer": b}),
        2,
        [("epoch", 1, None)],
    ),
    "lists with settings": (
        lambda a, b: ([a], [{"scheduler": StepLR(a, 1), "interval": "step", "name": "rate"}]),
        1,
        [("step", 1, None)],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_documented_form_is_understood(name):
    form, count, schedulers = FORMS[name]
    optimizers, configs = configure(Returns(form))
    assert len(optimizers) == count
    assert all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers)
    assert [(config.interval, config.frequency, config.monitor) for config in configs] == schedulers


WRONG = {
    "an optimizer and a scheduler": (lambda a, b: (a, StepLR(a, 1)), "two lists"),
    "a number": (lambda a, b: 3, "returned int"),
    "a misspelt key": (lambda a, b: {"optimiser": a}, 'Did you mean "optimizer"'),
    "no optimizer": (lambda a, b: {"lr_scheduler": StepLR(a, 1)}, "needs an optimizer"),
    "a misspelt setting": (
        lambda a, b: {"optimizer": a, "lr_scheduler": {"scheduler": StepLR(a, 1), "intervall": "step"}},
        'Did you mean "interval"',
    ),
    "settings without scheduler": (lambda a, b: {"optimizer": a, "lr_scheduler": {"interval": "step"}}, '"scheduler"'),
    "an unknown interval": (
        lambda a, b: {"optimizer": a, "lr_scheduler": {"scheduler": StepLR(a, 1), "interval": "batch"}},
        'expected "step" or "epoch"',
    ),
    "a frequency of nothing": (
        lambda a, b: {"optimizer": a, "lr_scheduler": {"scheduler": StepLR(a, 1), "frequency": 0}},
        "frequency",
    ),
    "a plateau of nothing": (lambda a, b: {"optimizer": a, "lr_scheduler": ReduceLROnPlateau(a)}, "monitor"),
    "a scheduler of another optimizer": (lambda a, b: ([a], [StepLR(b, 1)]), "was not returned"),
    "the older frequencies": (lambda a, b: [{"optimizer": a, "frequency": 1}], "automatic_optimization"),
}


@pytest.mark.parametrize("name", WRONG)
def test_any_other_form_is_refused_with_what_to_write(name):
    form, message = WRONG[name]
    with pytest.raises(fp.ConfigError, match=message):
        configure(Returns(form))


def rates(make_trainer, form, **kwargs) -> list[float]:
    """The first optimizer's learning rate at each batch of two epochs of 12."""
    seen: list[float] = []

    class Watch(fp.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(round(trainer.optimizers[0].param_groups[0]["lr"], 6))

    make_trainer(callbacks=[Watch()], **kwargs).fit(Returns(form), loader(), loader(20))
    return seen


def test_a_scheduler_steps_after_each_epoch_unless_told_otherwise(make_trainer):
    seen = rates(make_trainer, lambda a, b: ([a], [StepLR(a, 1, gamma=0.5)]), max_epochs=3)
    assert seen == [0.1] * 12 + [0.05] * 12 + [0.025] * 12


def test_a_scheduler_may_step_after_every_so_many_optimizer_steps(make_trainer):
    settings = {"interval": "step", "frequency": 4}
    seen = rates(
        make_trainer,
        lambda a, b: ([a], [{"scheduler": StepLR(a, 1, gamma=0.5), **settings}]),
        max_epochs=1,
        accumulate_grad_batches=2,
    )
    assert seen == [0.1] * 8 + [0.05] * 4


def test_a_plateau_scheduler_by_step_sees_what_the_step_has_logged(make_trainer):
    class Logging(Classifier):
        def training_step(self, batch, batch_idx):
            self.log("index", float(batch_idx))
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            plateau = {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "interval": "step", "monitor": "index"}
            return {"optimizer": optimizer, "lr_scheduler": plateau}

    trainer = make_trainer(max_epochs=1, limit_train_batches=4)
    trainer.fit(Logging(), loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3)


def test_a_plateau_scheduler_of_manual_optimisation_needs_no_monitor(make_trainer):
    class Manual(Classifier):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.lr_schedulers().step(1.0)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [ReduceLROnPlateau(optimizer, patience=0)]

    trainer = make_trainer(max_epochs=1, limit_train_batches=3)
    trainer.fit(Manual(), loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2)


def test_a_plateau_scheduler_is_given_the_monitored_metric(make_trainer):
    def plateau(a, b):
        scheduler = ReduceLROnPlateau(a, patience=0, threshold=0.99, factor=0.5)
        return {"optimizer": a, "lr_scheduler": scheduler, "monitor": "val_loss"}

    assert rates(make_trainer, plateau, max_epochs=3)[::12] == [0.1, 0.1, 0.05]


def test_a_misspelt_monitor_of_a_scheduler_is_named_with_the_nearest_metric(make_trainer):
    def plateau(a, b):
        return {"optimizer": a, "lr_scheduler": ReduceLROnPlateau(a), "monitor": "val_los"}

    with pytest.raises(fp.ConfigError, match=r'"val_los".*Did you mean "val_loss"'):
        rates(make_trainer, plateau)


def test_several_optimizers_need_manual_optimisation(make_trainer):
    with pytest.raises(fp.ConfigError, match="automatic_optimization = False"):
        make_trainer().fit(Returns(lambda a, b: [a, b]), loader())


def test_only_optimizers_that_must_be_given_a_closure_want_one():
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    assert wants_closure(torch.optim.LBFGS(parameters))
    assert not wants_closure(torch.optim.AdamW(parameters))


class SharpnessAware(torch.optim.SGD):
    """Takes the gradient a little uphill, as SAM does, and so evaluates the batch twice."""

    @torch.no_grad()
    def step(self, closure=None):
        closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        uphill = [0.05 * parameter.grad for parameter in parameters]
        for parameter, change in zip(parameters, uphill, strict=True):
            parameter += change
        loss = closure()
        for parameter, change in zip(parameters, uphill, strict=True):
            parameter -= change
        super().step()
        return loss


class Plain(torch.optim.SGD):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data -= 0.1 * parameter.grad


def test_an_optimizer_that_evaluates_a_batch_twice_trains_as_in_a_plain_loop(make_trainer):
    class Net(fp.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(8, 3)

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return SharpnessAware(self.parameters(), lr=0.1)

    trained, model = Net(), Net()
    model.load_state_dict(trained.state_dict())
    batches = list(loader(40))
    make_trainer(max_epochs=1).fit(trained, batches)

    optimizer = model.configure_optimizers()
    for batch in batches:

        @torch.enable_grad()
        def closure(batch=batch):
            optimizer.zero_grad()
            loss = model.training_step(batch, 0)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), model.parameters(), strict=True))


def test_an_optimizer_that_ignores_its_closure_gets_none():
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    assert may_use_closure(SharpnessAware(parameters, lr=0.1))
    assert not may_use_closure(Plain(parameters, lr=0.1))
    assert not may_use_closure(torch.optim.AdamW(parameters))


def test_arguments_of_a_step_by_hand_reach_the_optimizer(make_trainer):
    class Scaled(torch.optim.SGD):
        def step(self, closure=None, *, scale=1.0):
            scales.append(scale)
            return super().step(closure)

    class ByHand(Classifier):
        automatic_optimization = False

        def configure_optimizers(self):
            return Scaled(self.parameters(), lr=0.1)

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step(scale=batch_idx)

    scales: list[float] = []
    make_trainer(max_epochs=1, limit_train_batches=3).fit(ByHand(), loader())
    assert scales == [0, 1, 2]


def test_lbfgs_trains(make_trainer):
    class Newton(Classifier):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    torch.manual_seed(0)
    model = Newton()
    losses: list[float] = []

    class Watch(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append(float(outputs))

    trainer = make_trainer(max_epochs=1, callbacks=[Watch()])
    trainer.fit(model, loader(shuffle=False))
    assert trainer.global_step == 12
    assert sum(losses[6:]) < sum(losses[:6])
