"""A training that begins from the checkpoint of another one, with hyperparameters of its own, as trials of a tuning do."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from models.small import Classifier, loader

import footplate as fp
from footplate.checkpoint import load
from footplate.core.errors import CheckpointError
from footplate.jobs.tuning.measurements import read_reports
from footplate.jobs.tuning.report_lines import TRAINER
from footplate.training import job

VARIABLE = "FOOTPLATE_FROM_CHECKPOINT"


class Cyclic(Classifier):
    """Trains with one cycle of learning rate and momentum."""

    def __init__(self, lr: float = 1e-2, decay: float = 0.1, width: int = 16) -> None:
        super().__init__(lr, width)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.decay)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=36)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plateau(Classifier):
    """Reduces its learning rate after each epoch but the first."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "train_loss"}


class Course(fp.Callback):
    """Notes the loss and the settings of each step. May end the process's training, as `kill -9` does."""

    def __init__(self, kill_at: int = 0) -> None:
        self.steps: dict[int, tuple[Any, ...]] = {}
        self.kill_at = kill_at

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        group = trainer.optimizers[0].param_groups[0]
        settings = (group["lr"], group["betas"], group["weight_decay"])
        self.steps[trainer.global_step] = (float(loss).hex(), batch[1].tolist(), *settings)
        if trainer.global_step == self.kill_at:
            raise Killed


class Killed(BaseException):
    """Not an `Exception`, because the trainer saves a run before it passes on an `Exception`."""


def train(root: Path, module: Any, course: Course, max_epochs: int = 3, **kwargs: Any) -> fp.Trainer:
    save = fp.ModelCheckpoint(every_n_train_steps=6, save_top_k=-1)
    trainer = fp.Trainer(
        default_root_dir=root, callbacks=[course, save], max_epochs=max_epochs, accelerator="cpu", seed=7,
        enable_progress_bar=False, logger=False, log_every_n_steps=2, **kwargs,
    )  # fmt: skip
    trainer.fit(module, loader(), loader(20, shuffle=False))
    return trainer


def weights(module: torch.nn.Module) -> list[list[float]]:
    return [value.flatten().tolist() for value in module.state_dict().values()]


def at_step(root: Path, step: int) -> Path:
    return next((root / "checkpoints").glob(f"*step={step}.ckpt"))


@pytest.fixture
def first_fit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the next call of `fit` be the first one of its process, in an attempt of a job that begins from a checkpoint."""

    def begin(checkpoint: Path, attempt: int = 1) -> None:
        monkeypatch.setattr(job, "_fits", itertools.count(1))
        monkeypatch.setenv(VARIABLE, str(checkpoint))
        monkeypatch.setenv("FOOTPLATE_JOB_ID", "trial-1")
        monkeypatch.setenv("FOOTPLATE_JOB_ATTEMPT", str(attempt))

    return begin


def module_of(kind: type[Classifier], **hparams: Any) -> Classifier:
    torch.manual_seed(0)
    return kind(**hparams)


# In the middle of an epoch, and at its end.
@pytest.mark.parametrize("step", [18, 24])
@pytest.mark.parametrize("kind", [Classifier, Cyclic, Plateau])
def test_with_the_same_hyperparameters_it_is_bit_for_bit_one_uninterrupted_training(
    tmp_path: Path, first_fit: Any, kind: type[Classifier], step: int
):
    whole, net = Course(), module_of(kind)
    train(tmp_path / "whole", net, whole)
    begun, other = Course(), kind()
    first_fit(at_step(tmp_path / "whole", step))
    train(tmp_path / "begun", other, begun)
    assert begun.steps == {number: values for number, values in whole.steps.items() if number > step}
    assert weights(other) == weights(net)


@pytest.mark.parametrize("step", [18, 24])
def test_with_other_hyperparameters_it_has_its_own_settings_and_the_rest_of_the_checkpoint(
    tmp_path: Path, first_fit: Any, step: int
):
    train(tmp_path / "base", module_of(Cyclic), base := Course())
    train(tmp_path / "own", module_of(Cyclic, lr=0.3, decay=0.0), own := Course())
    first_fit(at_step(tmp_path / "base", step))
    trainer = train(tmp_path / "begun", Cyclic(lr=0.3, decay=0.0), begun := Course())
    later = range(step + 1, 37)
    assert list(begun.steps) == [*later]
    # Its settings are those of a training with its hyperparameters, and its batches those of the base.
    assert [begun.steps[number][2:] for number in later] == [own.steps[number][2:] for number in later]
    assert [begun.steps[number][1] for number in later] == [base.steps[number][1] for number in later]
    # It begins with the weights of the base, and leaves them.
    assert begun.steps[step + 1][0] == base.steps[step + 1][0]
    assert begun.steps[36][0] != base.steps[36][0]
    saved = load(trainer.checkpoint_callback.last_model_path)
    assert (saved["hyper_parameters"]["lr"], saved["hyper_parameters"]["decay"]) == (0.3, 0.0)


def test_one_that_is_killed_continues_from_its_own_newest_checkpoint(tmp_path: Path, first_fit: Any):
    train(tmp_path / "base", module_of(Cyclic), Course())
    base = at_step(tmp_path / "base", 12)
    first_fit(base)
    train(tmp_path / "whole", net := Cyclic(lr=0.3), whole := Course())
    # It is killed before its first save, and again after it.
    for attempt, kill_at in ((1, 14), (2, 21)):
        first_fit(base, attempt)
        with pytest.raises(Killed):
            train(tmp_path / "killed", Cyclic(lr=0.3), Course(kill_at))
    first_fit(base, 3)
    train(tmp_path / "killed", last := Cyclic(lr=0.3), rest := Course())
    assert min(rest.steps) == 19
    assert rest.steps == {number: values for number, values in whole.steps.items() if number > 18}
    assert weights(last) == weights(net)


def test_only_the_first_call_of_fit_begins_there(tmp_path: Path, first_fit: Any):
    train(tmp_path / "base", module_of(Cyclic), Course())
    first_fit(at_step(tmp_path / "base", 12))
    train(tmp_path / "one", Cyclic(), one := Course())
    train(tmp_path / "two", Cyclic(), two := Course())
    assert (min(one.steps), min(two.steps)) == (13, 1)


def test_the_checkpoints_and_scores_of_the_base_stay_its_own(
    tmp_path: Path, first_fit: Any, monkeypatch: pytest.MonkeyPatch
):
    """Validation is due at the step of the checkpoint: the begun training validates the weights of the base first."""
    best = {"monitor": "val_loss", "dirpath": tmp_path / "shared", "filename": "{val_loss}"}
    base = fp.Trainer(
        default_root_dir=tmp_path / "base", max_epochs=1, val_check_interval=6, enable_progress_bar=False, logger=False,
        callbacks=[fp.ModelCheckpoint(every_n_train_steps=6, save_top_k=-1), fp.ModelCheckpoint(**best)],
    )  # fmt: skip
    base.fit(module_of(Classifier), loader(), loader(20, shuffle=False))
    kept = Path(base.checkpoint_callbacks[1].best_model_path)
    first_fit(at_step(tmp_path / "base", 6))
    monkeypatch.setenv("FOOTPLATE_TRIAL_METRIC", "val_loss")
    monkeypatch.setenv("FOOTPLATE_TRIAL_REPORTS", str(tmp_path / TRAINER))
    begun = fp.Trainer(
        default_root_dir=tmp_path / "begun", max_epochs=1, val_check_interval=6, enable_progress_bar=False, logger=False,
        callbacks=[fp.ModelCheckpoint(**best)],
    )  # fmt: skip
    # A learning rate with which it gets worse.
    begun.fit(Classifier(lr=3.0), loader(), loader(20, shuffle=False))
    reports = [event for event in read_reports(tmp_path, "val_loss").events if isinstance(event, tuple)]
    assert [step for step, _ in reports] == [12.0]
    assert begun.checkpoint_callback.best_model_score == pytest.approx(reports[0][1])
    assert begun.checkpoint_callback.best_model_score > base.checkpoint_callbacks[1].best_model_score
    assert kept.exists()


def test_other_shapes_are_refused_and_named(tmp_path: Path, first_fit: Any):
    train(tmp_path / "base", module_of(Cyclic), Course())
    first_fit(at_step(tmp_path / "base", 12))
    with pytest.raises(CheckpointError) as raised:
        train(tmp_path / "begun", Cyclic(width=8), Course())
    assert "net.0.weight ((16, 8) in the checkpoint, (8, 8) in the module)" in str(raised.value)
    assert "can have other hyperparameters, but not other shapes" in str(raised.value)


def test_nothing_left_to_train_is_refused(tmp_path: Path, first_fit: Any):
    train(tmp_path / "base", module_of(Cyclic), Course())
    first_fit(at_step(tmp_path / "base", 24))
    with pytest.raises(
        CheckpointError, match="with max_epochs=2 and max_steps=-1, nothing is left to train from there"
    ):
        train(tmp_path / "begun", Cyclic(), Course(), max_epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_begin_there_too(tmp_path: Path, first_fit: Any, strategy: str):
    ranks: dict[str, Any] = {"devices": 2, "strategy": strategy}
    train(tmp_path / "base", module_of(Cyclic), Course(), **ranks)
    first_fit(at_step(tmp_path / "base", 12))
    trainer = train(tmp_path / "begun", Cyclic(lr=0.3, decay=0.0), begun := Course(), **ranks)
    train(tmp_path / "own", module_of(Cyclic, lr=0.3, decay=0.0), own := Course(), **ranks)
    assert trainer.global_step == 18
    assert {number: values[2:] for number, values in begun.steps.items()} == {
        number: values[2:] for number, values in own.steps.items() if number > 12
    }
