"""What a trainer in a trial of a tuning reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.small import Classifier, loader

import footplate as fp
from footplate.jobs.tuning.measurements import has_trained, read_reports, series
from footplate.jobs.tuning.report_lines import TRAINER


class Killed(BaseException):
    """Ends a training as `kill -9` does: nothing is saved any more."""


class KillAt(fp.Callback):
    """Ends training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            raise Killed


def begin_attempt(folder: Path, monkeypatch: pytest.MonkeyPatch, metric: str = "val_loss") -> Path:
    """Set the variables of an attempt of a trial. Returns the attempt's folder."""
    folder.mkdir()
    monkeypatch.setenv("FOOTPLATE_TRIAL_METRIC", metric)
    monkeypatch.setenv("FOOTPLATE_TRIAL_REPORTS", str(folder / TRAINER))
    return folder


def fit(make_trainer: Any, ckpt_path: str | None = None, **kwargs: Any) -> fp.Trainer:
    torch.manual_seed(0)
    trainer = make_trainer(max_epochs=3, val_check_interval=4, **kwargs)
    trainer.fit(Classifier(), loader(), loader(20, shuffle=False), ckpt_path=ckpt_path)
    return trainer


def test_each_value_of_the_metric_is_reported_whatever_the_loggers_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trainer: Any
):
    folder = begin_attempt(tmp_path / "attempt", monkeypatch)
    trainer = fit(make_trainer, logger=False)
    reports = read_reports(folder, "val_loss").events
    assert [event[0] for event in reports if isinstance(event, tuple)] == [4, 8, 12, 16, 20, 24, 28, 32, 36]
    assert reports[-1] == (36.0, pytest.approx(trainer.callback_metrics["val_loss"].item()))
    assert trainer.loggers == []


def test_an_evaluation_after_training_is_reported_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trainer: Any
):
    folder = begin_attempt(tmp_path / "attempt", monkeypatch, "test_loss")
    trainer = fit(make_trainer)
    trainer.test(dataloaders=loader(20, shuffle=False), verbose=False)
    assert series([read_reports(folder, "test_loss").events]) == ((36.0, trainer.callback_metrics["test_loss"].item()),)


def test_a_metric_that_is_never_logged_leaves_the_names_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trainer: Any
):
    folder = begin_attempt(tmp_path / "attempt", monkeypatch, "accuracy")
    fit(make_trainer)
    reports = read_reports(folder, "accuracy")
    assert not reports.events
    assert {"val_loss", "train_loss_epoch"} <= reports.names
    assert (folder / TRAINER).read_text().count("logged") < 5


def test_a_killed_and_continued_training_reports_the_series_of_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trainer: Any
):
    whole = begin_attempt(tmp_path / "whole", monkeypatch)
    fit(make_trainer, default_root_dir=tmp_path / "whole-run")
    save = fp.ModelCheckpoint(every_n_train_steps=6, save_last=True)
    first = begin_attempt(tmp_path / "first", monkeypatch)
    with pytest.raises(Killed):
        fit(make_trainer, callbacks=[save, KillAt(29)])
    rolled_back = [event for event in read_reports(first, "val_loss").events if isinstance(event, tuple)]
    second = begin_attempt(tmp_path / "second", monkeypatch)
    fit(make_trainer, "last", callbacks=[save])
    attempts = [read_reports(folder, "val_loss").events for folder in (first, second)]
    continued_from = next(event for event in attempts[1] if isinstance(event, float))
    assert rolled_back[-1][0] > continued_from
    assert series(attempts) == series([read_reports(whole, "val_loss").events])


def test_a_training_that_reaches_its_end_reports_that_and_one_that_is_killed_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trainer: Any
):
    save = fp.ModelCheckpoint(every_n_train_steps=6, save_last=True)
    killed = begin_attempt(tmp_path / "killed", monkeypatch)
    with pytest.raises(Killed):
        fit(make_trainer, callbacks=[save, KillAt(29)])
    whole = begin_attempt(tmp_path / "whole", monkeypatch)
    fit(make_trainer, "last", callbacks=[save])
    done = begin_attempt(tmp_path / "done", monkeypatch)
    fit(make_trainer, "last", callbacks=[save])
    trainings = [read_reports(folder, "val_loss").trainings for folder in (killed, whole, done)]
    assert trainings[0] == [("begins", 0.0)]
    assert [kind for kind, _ in trainings[1]] == ["continues", "ends"]
    assert [has_trained(trainings[:count]) for count in (1, 2, 3)] == [False, True, True]


def test_checkpoints_from_which_training_goes_on_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trainer: Any
):
    folder = begin_attempt(tmp_path / "attempt", monkeypatch)
    every = fp.ModelCheckpoint(every_n_train_steps=9, save_top_k=-1)
    weights = fp.ModelCheckpoint(every_n_train_steps=5, save_weights_only=True, filename="weights-{step}")
    fit(make_trainer, callbacks=[every, weights])
    lines = [json.loads(line) for line in (folder / TRAINER).read_text().splitlines()]
    reported = [(line["step"], Path(line["checkpoint"]).name) for line in lines if "checkpoint" in line]
    # Those of step 36 are of the end.
    assert [step for step, _ in reported][:1] == [9]
    assert set(reported) <= {(9, "epoch=0-step=9.ckpt"), (18, "epoch=1-step=18.ckpt"), (27, "epoch=2-step=27.ckpt")}


def test_a_value_that_is_not_finite_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trainer: Any):
    class Diverges(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", float("nan"))

    folder = begin_attempt(tmp_path / "attempt", monkeypatch)
    make_trainer(max_epochs=1).fit(Diverges(), loader(), loader(20, shuffle=False))
    lines = [json.loads(line) for line in (folder / TRAINER).read_text().splitlines()]
    assert {"step": 12, "value": "nan"} in lines


def test_outside_of_a_trial_nothing_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trainer: Any):
    begin_attempt(tmp_path / "attempt", monkeypatch)
    make_trainer(fast_dev_run=True).fit(Classifier(), loader(), loader(20, shuffle=False))
    monkeypatch.delenv("FOOTPLATE_TRIAL_REPORTS")
    fit(make_trainer)
    assert not (tmp_path / "attempt" / TRAINER).exists()
