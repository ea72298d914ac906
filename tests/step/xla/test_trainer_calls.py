"""Several steps in one program call: equal to single steps, and the cases that need single steps."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.small import Classifier, loader

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint.run_state import Progress
from footplate.step.optimizers import SchedulerConfig
from footplate.training.multi_step import next_chunk, rates_ahead
from step.xla.trained import Steady, equal


def run(make_trainer, root, model, steps, **kwargs):
    """Two epochs with every event that may come between two steps."""
    saver = fp.ModelCheckpoint(every_n_train_steps=5, save_top_k=-1)
    trainer = make_trainer(
        accelerator="xla", precision="64-true", iterations_per_loop=steps, log_every_n_steps=3, val_check_interval=7,
        callbacks=[saver, fp.LearningRateMonitor()], logger=fp.CSV(), default_root_dir=root, **kwargs,
    )  # fmt: skip
    trainer.fit(model, loader(240), loader(20, shuffle=False))
    return trainer, saver


class Falling(Classifier):
    """With dropout, and a learning rate that decreases in every second step."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]


@pytest.mark.slow
def test_several_steps_in_a_call_are_bit_for_bit_those_of_single_calls(make_trainer, tmp_path):
    torch.manual_seed(0)
    initial = Falling().state_dict()
    ends = []
    for steps in (1, 4):
        model = Falling()
        model.load_state_dict(initial)
        made, saver = run(make_trainer, tmp_path / str(steps), model, steps, devices=2, max_steps=45)
        state = checkpoint.load(checkpoint.newest([saver.dirpath]))
        kept = {key: state[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "progress")}
        kept["progress"].pop("seconds")
        names = sorted(path.rsplit("/", 1)[-1] for path in saver.best_k_models)
        ends.append((kept, names, (tmp_path / str(steps) / "metrics.csv").read_text()))
    assert max(compilation.steps for compilation in made.step.compilations) == 4
    assert equal(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]


@pytest.mark.parametrize("what", ["hook", "plateau", "lr_scheduler_step"])
def test_steps_are_made_one_by_one_where_something_comes_between_them(what, make_trainer, caplog):
    class Looks(Steady):
        pass

    def noted(self, *args):
        return super(Looks, self).lr_scheduler_step(*args) if what == "lr_scheduler_step" else None

    def by_plateau(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "monitor": "train_loss"}]

    name, function, said = {
        "hook": ("on_train_batch_end", noted, "Looks overrides on_train_batch_end() and may look at the weights"),
        "plateau": (
            "configure_optimizers",
            by_plateau,
            "ReduceLROnPlateau sets the next step's learning rate by a metric",
        ),
        "lr_scheduler_step": ("lr_scheduler_step", noted, "Looks overrides lr_scheduler_step()"),
    }[what]
    setattr(Looks, name, function)
    trainer = make_trainer(accelerator="xla", iterations_per_loop=8, max_epochs=1, log_every_n_steps=1)
    with caplog.at_level(logging.WARNING, "footplate"):
        trainer.fit(Looks(), loader(80))
    assert f"iterations_per_loop=8: one step at a time, since {said}" in caplog.text
    assert trainer.global_step == 8
    assert {compilation.steps for compilation in trainer.step.compilations} == {1}


def test_the_steps_of_a_call_are_stopped_and_saved_after_it(make_trainer):
    """A signal in the middle of a call: the call finishes, and the checkpoint has the state after it."""
    import signal

    class Sends(fp.Callback):
        sees_weights = False

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 6:
                signal.raise_signal(signal.SIGTERM)

    Sends.__module__ = "footplate.callbacks.early_stopping"
    trainer = make_trainer(accelerator="xla", iterations_per_loop=4, callbacks=Sends(), val_check_interval=None)
    with pytest.raises(SystemExit):
        trainer.fit(Steady(), loader(200))
    meta = checkpoint.read_meta(checkpoint.newest([trainer.checkpoint_callback.dirpath]))
    assert meta["global_step"] == meta["batches"] == 8


class Standing:
    """A run as far as `until_due` asks of it."""

    def __init__(self, total, val_every, by_epoch, max_steps, save_every):
        saver = fp.ModelCheckpoint(every_n_train_steps=save_every)
        self.run = self.config = self
        self.progress = Progress()
        self.num_training_batches, self.val_check_batches = total, val_every
        self.check_val_every_n_epoch = 1 if by_epoch else None
        self.max_steps, self.callbacks, self.val_loaders = max_steps, [saver], [object()]

    def due(self, total, val_every, save_every):
        progress = self.progress
        counted = progress.batch_idx if self.check_val_every_n_epoch else progress.batches
        return {
            "epoch": progress.batch_idx == total,
            "validation": counted % val_every == 0,
            "end": progress.global_step == self.max_steps,
            "save": bool(save_every) and progress.global_step % save_every == 0,
        }


@settings(deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 45), st.booleans(), st.integers(-1, 60).filter(bool), st.integers(0, 20),
    st.integers(1, 12),
)  # fmt: skip
def test_nothing_is_ever_due_inside_a_call(total, val_every, by_epoch, max_steps, save_every, most):
    run = Standing(total, min(val_every, total) if by_epoch else val_every, by_epoch, max_steps, save_every)
    progress = run.progress
    for _ in range(60):
        if progress.global_step == max_steps:
            break
        size = next_chunk(run, most)
        assert size in (1, most)
        for place in range(size):
            progress.batch_idx += 1
            progress.batches += 1
            progress.global_step += 1
            if place < size - 1:
                assert not any(run.due(total, run.val_check_batches, save_every).values())
        if progress.batch_idx >= total:
            progress.next_epoch()


SCHEDULES = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], 50, cycle_momentum=False),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequence": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
        ],
        [4],
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_rates_of_steps_to_come_are_those_that_the_scheduler_then_sets(schedule, frequency):
    class Run:
        pass

    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    groups = [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    scheduler = SCHEDULES[schedule](optimizer)
    run = Run()
    run.optimizers, run.progress = [optimizer], Progress()
    run.lr_scheduler_configs = [SchedulerConfig(scheduler, "step", frequency)]
    for _ in range(4):
        foretold = rates_ahead(run, 5)
        for rates in foretold:
            now = [group["lr"] for group in optimizer.param_groups]
            assert rates == now
            assert all(math.isfinite(rate) for rate in rates)
            run.progress.global_step += 1
            if run.progress.global_step % frequency == 0:
                scheduler.step()
