"""The rows that loggers receive, and the latest metrics."""

from __future__ import annotations

import csv

import pytest
from models.small import Classifier, loader

import footplate as fp
from footplate.training.lock import only_writer


class Rows(fp.Logger):
    def __init__(self) -> None:
        self.rows: list[tuple[int, int, dict[str, float]]] = []
        self.calls: list[str] = []

    def setup(self, run_dir, hparams):
        self.calls.append("setup")
        self.hparams = hparams

    def log_metrics(self, metrics, step, epoch):
        self.rows.append((step, epoch, metrics))

    def log_model(self, trainer):
        self.calls.append("model")

    def finalize(self, status):
        self.calls.append(status)


def test_every_logger_gets_every_row_at_the_steps_that_were_asked_for(fit):
    first, second = Rows(), Rows()
    fit(logger=[first, second], log_every_n_steps=5)
    assert first.rows == second.rows
    by_step = [step for step, _, row in first.rows if "train_loss_step" in row]
    assert by_step == [5, 10, 15, 20]
    assert [(step, epoch) for step, epoch, row in first.rows if "val_loss" in row] == [(12, 0), (24, 1)]
    assert [(step, epoch) for step, epoch, row in first.rows if "train_loss_epoch" in row] == [(12, 0), (24, 1)]
    assert first.calls == ["setup", "model", "success"]
    assert first.hparams["lr"] == 0.01
    assert first.hparams["trainer/max_epochs"] == 2


def test_a_logger_is_closed_whatever_happens(make_trainer):
    logger = Rows()

    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_trainer(logger=logger).fit(Fails(), loader())
    assert logger.calls == ["setup", "failed"]


def test_results_of_an_evaluation_are_added_to_the_file_of_metrics(make_trainer):
    trainer = make_trainer(logger=None, log_every_n_steps=50)
    model = Classifier()
    trainer.fit(model, loader())
    before = (trainer.run_dir / "metrics.csv").read_text().splitlines()
    trainer.validate(model, loader(40), verbose=False)
    trainer.fit(model, loader())
    again = make_trainer(logger=None)
    again.test(model, loader(40), ckpt_path="last", verbose=False)

    rows = list(csv.DictReader((trainer.run_dir / "metrics.csv").read_text().splitlines()))
    names = ("val_loss", "test_loss", "train_loss_epoch")
    told = [(int(row["step"]), int(row["epoch"]), *(name for name in names if row[name])) for row in rows]
    trained = [(12, 0, "train_loss_epoch"), (24, 1, "train_loss_epoch")]
    assert len(before) == 3
    assert told == [*trained, (24, 2, "val_loss"), *trained, (0, 0, "test_loss")]
    assert not list(trainer.run_dir.glob("metrics-*.csv"))


def test_an_evaluation_beside_a_process_that_trains_leaves_its_record_alone(make_trainer, caplog):
    trainer = make_trainer(logger=None)
    with only_writer(trainer.run_dir):
        (metrics,) = trainer.validate(Classifier(), loader(40), verbose=False)
    assert metrics
    assert "The results are not logged: " in caplog.text
    assert not (trainer.run_dir / "metrics.csv").exists()


def test_callback_metrics_hold_the_newest_of_everything(fit):
    made, watch = fit(max_epochs=1, log_every_n_steps=50)
    metrics = {name: float(value) for name, value in made.callback_metrics.items()}
    assert set(metrics) == {"train_loss", "train_loss_step", "train_loss_epoch", "val_loss"}
    assert metrics["train_loss_step"] == pytest.approx(watch.losses[-1])
    assert metrics["train_loss_epoch"] == pytest.approx(sum(watch.losses) / 12)
