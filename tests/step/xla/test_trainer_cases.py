"""Hard cases of training with `accelerator="xla"`, each against eager torch in double precision."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from models.small import loader
from torch import nn

import footplate as fp
from footplate.step.xla.runtime import program_cache
from step.xla.trained import Steady, worst

ROWS = 40  # four batches of 10
ODD = 37  # three batches of 10 and one of 7, which is another capture


def fitted(make_trainer, accelerator, kind, callbacks=(), val=None, rows=ROWS, **given):
    torch.manual_seed(0)
    model = kind()
    torch.manual_seed(0)
    trainer = make_trainer(
        **{"accelerator": accelerator, "precision": "64-true", "callbacks": [callback() for callback in callbacks],
           "enable_checkpointing": False, **given},
    )  # fmt: skip
    trainer.fit(model, loader(rows), val)
    return trainer


def alike(trainer, kind, devices=1, xla=None, **given):
    """Train with both. Assert equal weights, buffers, metrics and numbers of steps."""
    wanted = fitted(trainer, "cpu", kind, **given)
    compiled = fitted(trainer, "xla", kind, devices=devices, **{**given, **(xla or {})})
    assert compiled.global_step == wanted.global_step
    theirs, mine = wanted.callback_metrics, compiled.callback_metrics
    assert mine.keys() == theirs.keys()
    assert {name: float(mine[name]) for name in mine} == pytest.approx(
        {name: float(theirs[name]) for name in theirs}, rel=1e-5
    )
    assert worst(compiled.module, wanted.module) < 1e-6
    return wanted, compiled


class Normed(Steady):
    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))


class Skips(Normed):
    """Skips short batches, except for their effect on BatchNorm."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if len(batch[0]) == 10 else None


@pytest.mark.parametrize("window", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_batch_that_is_skipped_is_no_step_and_ends_its_window(window, make_trainer):
    alike(make_trainer, Skips, rows=ODD, accumulate_grad_batches=window)


class NormOfGradients(Steady):
    def on_before_optimizer_step(self, optimizer):
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.log("norm", torch.stack([gradient.norm() for gradient in gradients]).norm())


@pytest.mark.slow
def test_hooks_log_what_they_make_of_gradients_on_several_devices_too(make_trainer):
    alike(make_trainer, NormOfGradients, devices=2, accumulate_grad_batches=3)


@pytest.mark.slow
def test_batch_norm_that_is_synchronised_sees_all_rows_of_an_odd_batch_and_inside_windows(make_trainer):
    alike(make_trainer, Normed, devices=2, xla={"sync_batchnorm": True}, rows=ODD, accumulate_grad_batches=3)


class ByLoader(Steady):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", 2 * loss if dataloader_idx == 1 else loss)


@pytest.mark.parametrize("loaders", [1, 2])
def test_a_validation_step_knows_its_loader(loaders, make_trainer):
    alike(make_trainer, ByLoader, val=[loader(20, shuffle=False), loader(15, 5, shuffle=False)][:loaders])


class Deep(Steady):
    """Reads numbers of a submodule, a list and its hyper-parameters. Each changes with the epoch."""

    def __init__(self):
        super().__init__()
        self.net.scale, self.scales = 1.0, [1.0]
        self.hparams.scale = 1.0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.net.scale * self.scales[0] * self.hparams.scale

    def on_train_epoch_start(self):
        self.net.scale = self.scales[0] = self.hparams.scale = 1 / (1 + self.current_epoch)


def test_numbers_in_submodules_lists_and_hyperparameters_count_when_they_change(make_trainer):
    alike(make_trainer, Deep)


class Annealed(Steady):
    """Its loss has a weight that a hook sets before every batch."""

    def __init__(self):
        super().__init__()
        self.weight = 0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.weight

    def on_train_batch_start(self, batch, batch_idx):
        self.weight = 1.0 / (1 + self.global_step)


def test_a_number_that_changes_in_every_step_is_an_input_from_its_first_change_on(make_trainer, caplog):
    with caplog.at_level(logging.WARNING, "footplate"):
        _, made = alike(make_trainer, Annealed, rows=150)
    trained = [compilation for compilation in made.step.compilations if "training_step" in compilation.name]
    assert len(trained) <= 3
    assert "self.weight was 1.0 when the step was captured and is 0.5 now; read at" in caplog.text


class Chooses(Annealed):
    def training_step(self, batch, batch_idx):
        return Steady.training_step(self, batch, batch_idx) * (2.0 if self.weight < 0.3 else min(1.0, self.weight))


@pytest.mark.slow
def test_a_number_by_which_the_step_decides_has_a_program_for_each_way(make_trainer):
    _, made = alike(make_trainer, Chooses, rows=150)
    assert len([compilation for compilation in made.step.compilations if "training_step" in compilation.name]) <= 4


class Spells(Annealed):
    def training_step(self, batch, batch_idx):
        return Steady.training_step(self, batch, batch_idx) * len(str(self.weight))


@pytest.mark.slow
def test_a_number_that_can_only_be_a_constant_may_not_change_for_ever(make_trainer, monkeypatch):
    monkeypatch.setattr(program_cache, "MOST_CHANGES", 3)
    with pytest.raises(fp.ConfigError, match=r"compiled 4 times.*self\.weight was"):
        fitted(make_trainer, "xla", Spells, rows=150)


class Cycles(Steady):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=32)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


@pytest.mark.parametrize("steps", [1, 4])
def test_one_cycle_moves_the_momentum_without_another_program(steps, make_trainer):
    _, made = alike(make_trainer, Cycles, rows=160, xla={"iterations_per_loop": steps})
    assert len([compilation for compilation in made.step.compilations if "training_step" in compilation.name]) == 1


class Raises(fp.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            raise ArithmeticError


def test_after_an_exception_in_a_callback_the_module_has_the_weights_of_the_last_step(make_trainer, tmp_path):
    models = []
    for name in ("cpu", "xla"):
        torch.manual_seed(0)
        models.append(Steady())
        trainer = make_trainer(
            accelerator=name, precision="64-true", callbacks=Raises(), default_root_dir=tmp_path / name
        )
        torch.manual_seed(0)
        with pytest.raises(ArithmeticError):
            trainer.fit(models[-1], loader(ROWS))
    assert worst(models[1], models[0]) < 1e-6


class Buffered(Steady):
    """Counts its steps, and remembers a mean of its inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))
        for parameter in self.net[0].parameters():
            parameter.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.mean.lerp_(batch[0].mean(0), 0.1)
        return super().training_step(batch, batch_idx) * (1 + 0.01 * self.steps)


class SetsRates(fp.Callback):
    def on_train_batch_end(self, trainer, *_):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 / (1 + trainer.global_step)


def test_buffers_frozen_parameters_averaged_weights_and_rates_that_a_callback_sets(make_trainer):
    _, made = alike(
        make_trainer, Buffered, devices=2, callbacks=[SetsRates, lambda: fp.EMAWeightAveraging(0.5)], rows=ODD,
        val=loader(20, shuffle=False), val_check_interval=3,
    )  # fmt: skip
    assert int(made.module.steps) == 8


class Teacher(Steady):
    """A teacher follows the student. Its parameters get new data, as in many published programs."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        for follows, leads in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            follows.data = 0.9 * follows.data + 0.1 * leads.data
        loss = super().training_step(batch, batch_idx)
        return loss + F.mse_loss(self(batch[0]), self.teacher(batch[0].flatten(1)))


def test_parameters_that_are_given_new_data_have_it(make_trainer):
    alike(make_trainer, Teacher, devices=2)


class Sharper(Steady):
    """From its second epoch on, uses another activation and another loss."""

    def __init__(self):
        super().__init__()
        self.criterion = F.cross_entropy

    def training_step(self, batch, batch_idx):
        return self.criterion(self(batch[0]), batch[1])

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[2] = nn.ReLU()
            self.criterion = F.multi_margin_loss


def test_an_exchanged_layer_or_loss_counts(make_trainer):
    alike(make_trainer, Sharper)


class Counts(Steady):
    """Logs values that aren't means."""

    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        self.log("ones", (batch[1] == 1).sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("worst", losses.max(), True, None, False, True, "max")
        self.log("best", losses.min(), reduce_fx=torch.min, on_step=False, on_epoch=True)
        return losses.mean()


def test_sums_and_extremes_are_those_of_all_rows_on_several_devices(make_trainer):
    alike(make_trainer, Counts, devices=4, rows=ODD)


class Answers(Steady):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "rows": batch[0]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("seen", outputs["loss"], on_epoch=True)


def test_a_hook_is_given_the_loss_as_the_step_returned_it(make_trainer):
    alike(make_trainer, Answers)


class Gaussian(Steady):
    def training_step(self, batch, batch_idx):
        spread = torch.distributions.Normal(self(batch[0]), 1.0)
        return torch.distributions.kl_divergence(spread, torch.distributions.Normal(0.0, 2.0)).mean()


def test_distributions_are_captured_without_looking_at_their_arguments(make_trainer, monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile ends it
    alike(make_trainer, Gaussian)
    with pytest.raises(ValueError, match="found invalid values"):
        torch.distributions.Normal(0.0, -1.0)


class Weighs(Steady):
    """Makes a mask of tensors that don't come from a batch, like the masks of transformers."""

    def validation_step(self, batch, batch_idx):
        place = torch.arange(len(batch[0]))
        counts = place.new_ones((), dtype=torch.bool) & (place > 0)
        self.log("val_loss", (F.cross_entropy(self(batch[0]), batch[1], reduction="none") * counts).mean())


def test_an_evaluation_may_compare_tensors_that_it_makes(make_trainer):
    alike(make_trainer, Weighs, val=loader(20, shuffle=False))
