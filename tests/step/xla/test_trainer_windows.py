"""Windows of accumulated batches, mixed precision and manual optimisation with `accelerator="xla"`."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from models.small import loader

import footplate as fp
from step.xla.trained import Steady, worst


class ByHand(Steady):
    """Two optimizers, each for half of the network, both stepped in every batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = F.cross_entropy(self(batch[0]), batch[1])
        for optimizer in (first, second):
            optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, 0.5)
        first.step()
        second.step()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.net[0].parameters(), lr=0.2, momentum=0.9),
            torch.optim.SGD(self.net[3].parameters(), lr=0.1),
        ]


class Clips(Steady):
    """Overrides clipping and the backward pass."""

    def backward(self, loss):
        (2 * loss).backward()

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.1, "value")


class Unsized:
    """Batches of unknown number."""

    def __iter__(self):
        return iter(loader(70, shuffle=False))


def fitted(make_trainer, accelerator, model, data=None, val=None, ckpt_path=None, **given):
    """Train with batches of 10. Each other form of batch, and validation, is another capture."""
    torch.manual_seed(0)
    trainer = make_trainer(**{"accelerator": accelerator, "precision": "64-true", "max_epochs": 2, **given})
    trainer.fit(model, loader(60) if data is None else data, val, ckpt_path=ckpt_path)
    return trainer


def new(kind):
    torch.manual_seed(0)
    return kind()


def test_accumulated_batches_are_those_of_eager_torch(make_trainer):
    given = {"data": loader(115), "accumulate_grad_batches": 5, "gradient_clip_val": 0.5}
    wanted = fitted(make_trainer, "cpu", new(Steady), **given)
    compiled = fitted(make_trainer, "xla", new(Steady), devices=2, **given)
    assert compiled.global_step == wanted.global_step == 6  # two windows of five batches and one of two, twice
    assert worst(compiled.module, wanted.module) < 1e-6


def test_a_run_that_was_cut_off_in_a_window_is_continued_there_and_on_other_hardware(make_trainer, tmp_path):
    class PowerCut(BaseException):
        pass

    class Cuts(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.progress.batches == 9:
                raise PowerCut

    def run(accelerator, root, callbacks=(), ckpt_path=None):
        saves = fp.ModelCheckpoint(every_n_epochs=1, save_top_k=-1, save_last=True)
        return fitted(
            make_trainer, accelerator, new(Steady), loader(120), loader(20, shuffle=False), accumulate_grad_batches=5,
            val_check_interval=7, default_root_dir=tmp_path / root, callbacks=[*callbacks, saves], ckpt_path=ckpt_path,
        )  # fmt: skip

    whole = run("cpu", "whole")
    for first in ("cpu", "xla"):
        with pytest.raises(PowerCut):
            run(first, first, [Cuts()])
    for first, then in (("xla", "xla"), ("xla", "cpu"), ("cpu", "xla")):
        root = f"{first}-{then}"
        shutil.copytree(tmp_path / first, tmp_path / root)
        assert worst(run(then, root, ckpt_path="last").module, whole.module) < 1e-6, root


def test_an_epoch_of_unknown_length_that_ends_in_a_window_steps_with_what_there_is(make_trainer):
    wanted = fitted(make_trainer, "cpu", new(Steady), Unsized(), accumulate_grad_batches=5)
    compiled = fitted(make_trainer, "xla", new(Steady), Unsized(), accumulate_grad_batches=5)
    assert compiled.global_step == wanted.global_step == 4
    assert worst(compiled.module, wanted.module) < 1e-6


def test_two_optimizers_by_hand_are_those_of_eager_torch(make_trainer):
    wanted, compiled = (fitted(make_trainer, name, new(ByHand)) for name in ("cpu", "xla"))
    assert compiled.global_step == wanted.global_step == 24
    assert worst(compiled.module, wanted.module) < 1e-6


def test_a_backward_pass_and_clipping_of_the_modules_own_are_compiled(make_trainer):
    wanted, compiled = (fitted(make_trainer, name, new(Clips)) for name in ("cpu", "xla"))
    assert worst(compiled.module, wanted.module) < 1e-6


def test_mixed_precision_is_near_that_of_eager_torch_and_keeps_weights_in_single(make_trainer):
    runs = [fitted(make_trainer, name, new(Steady), precision="bf16-mixed") for name in ("cpu", "xla")]
    losses = [float(made.callback_metrics["train_loss_epoch"]) for made in runs]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    full = float(fitted(make_trainer, "xla", new(Steady), precision="32-true").callback_metrics["train_loss_epoch"])
    assert 0 < abs(full - losses[1]) < 0.02 * full
    assert all(parameter.dtype == torch.float32 for parameter in runs[1].module.parameters())


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [({"accumulate_grad_batches": 4}, Steady, "one step of several batches"), ({}, ByHand, "ByHand optimises by hand")],
)
def test_several_steps_in_a_call_are_one_by_one_where_a_step_is_not_a_batch(given, kind, said, make_trainer, caplog):
    made = fitted(make_trainer, "xla", new(kind), iterations_per_loop=4, max_epochs=1, **given)
    assert said in caplog.text
    assert made.step.chunk_size == 1
