"""Lightning's loggers on our trainer: real files, read back."""

from __future__ import annotations

import csv
import logging
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from models.zoo import Plain, loaders

import footplate as fp
from footplate.compat.lightning import loggers as lightning_loggers
from footplate.compat.lightning.loggers import translate_logger


class Talks(Plain):
    """Has hyper-parameters and an example input, and calls its logger directly."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.ones(2, 8)

    def on_train_epoch_end(self) -> None:
        self.logger.log_metrics({"mine": 7.0}, step=self.global_step)
        self.logger.experiment  # noqa: B018  what people reach through to


def test_csv_logger_writes_its_files(make_trainer: Any, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "logs", name="exp")

    make_trainer(logger=logger, log_every_n_steps=5).fit(Talks(), *loaders())

    with (tmp_path / "logs/exp/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["train_loss"]] == ["5", "10", "15", "20"]
    assert [row["step"] for row in rows if row["val_loss"]] == ["10", "20"]
    assert [row["epoch"] for row in rows if row["val_loss"]] == ["0", "1"]
    assert [row["step"] for row in rows if row["mine"]] == ["10", "20"]
    assert "width: 3" in (tmp_path / "logs/exp/version_0/hparams.yaml").read_text()


def test_tensorboard_logger_writes_events_and_the_graph(make_trainer: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path / "logs", name="exp", log_graph=True)

    make_trainer(logger=logger, log_every_n_steps=5).fit(Talks(), *loaders())

    events = EventAccumulator(str(tmp_path / "logs/exp/version_0"))
    events.Reload()
    assert [event.step for event in events.Scalars("train_loss")] == [5, 10, 15, 20]
    assert [event.value for event in events.Scalars("mine")] == [7.0, 7.0]
    assert events.Graph().node


@pytest.mark.slow
def test_mlflow_logger_of_lightning_keeps_metrics_and_parameters(make_trainer: Any, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    logger = MLFlowLogger("exp", tracking_uri=uri, artifact_location=str(tmp_path / "artifacts"))

    make_trainer(logger=logger, log_every_n_steps=5).fit(Talks(), *loaders())

    run = MlflowClient(uri).get_run(logger.run_id)
    assert run.data.params["width"] == "3"
    assert {"train_loss", "val_loss", "mine"} <= set(run.data.metrics)
    assert run.info.status == "FINISHED"


def test_several_loggers_of_both_kinds_work_together(make_trainer: Any, tmp_path: Path) -> None:
    ours, theirs = fp.CSV(tmp_path / "ours.csv"), CSVLogger(tmp_path / "theirs")

    make_trainer(logger=[ours, theirs], log_every_n_steps=5).fit(Plain(), *loaders())

    with (
        (tmp_path / "ours.csv").open() as one,
        (tmp_path / "theirs/lightning_logs/version_0/metrics.csv").open() as two,
    ):
        mine, their = list(csv.DictReader(one)), list(csv.DictReader(two))
    assert [row["train_loss"] for row in mine] == [row["train_loss"] for row in their]


class Failing(Logger):
    """Accepts the second row only at the third attempt."""

    name, version = "failing", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int | None] = []
        self.attempts = 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Ignore hyperparameters."""

    def log_metrics(self, *, metrics: dict[str, float], step: int | None = None) -> None:  # as Lightning calls it
        if len(self.rows) == 1 and self.attempts < 2:
            self.attempts += 1
            raise OSError("the tracker is away")
        self.rows.append(step)


def test_a_row_that_fails_is_tried_again_and_none_is_written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("footplate.tracking.writer.INTERVAL_S", 0.01)
    original = Failing()
    logger = translate_logger(original)
    logger.setup(Path(), {})
    for step in range(4):
        logger.log_metrics({"loss": 1.0}, step, 0)

    deadline = time.monotonic() + 60
    while len(original.rows) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    logger.finalize("success")

    assert original.rows == [0, 1, 2, 3]


def test_a_logger_that_always_fails_does_not_stop_training(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lightning_loggers, "CLOSE_TIMEOUT_S", 0.1)

    class Broken(Failing):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            raise OSError("the tracker is away")

        def finalize(self, status: str) -> None:
            raise OSError("still away")

    runner = make_trainer(logger=Broken(), log_every_n_steps=5)
    with caplog.at_level(logging.WARNING):
        runner.fit(Plain(), *loaders())

    assert runner.global_step == 20
    assert "Broken.finalize() failed: still away" in caplog.text


def test_what_cannot_be_a_logger_is_refused() -> None:
    with pytest.raises(
        fp.ConfigError, match=r"logger: expected a footplate\.Logger, or a logger of lightning or pytorch_.*, got str"
    ):
        fp.Trainer(max_epochs=1, logger="csv")


@pytest.mark.parametrize("kind", [MLFlowLogger, WandbLogger])
def test_uploading_lightnings_checkpoints_is_refused(kind: type) -> None:
    logger = kind.__new__(kind)
    logger._log_model = True

    with pytest.raises(fp.ConfigError, match=r"log_model=….*uploads Lightning's checkpoint files.*footplate\.MLflow"):
        translate_logger(logger)


def test_a_logger_that_cannot_begin_says_so_before_training(make_trainer: Any) -> None:
    class Refuses(Failing):
        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            raise PermissionError("no right to write")

    with pytest.raises(fp.ConfigError, match="Refuses can't begin its record: no right to write"):
        make_trainer(logger=Refuses()).fit(Plain(), *loaders())


class Told(Logger):
    """Keeps the rows that it receives."""

    name, version = "told", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.ends: list[str] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Ignore hyperparameters."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def finalize(self, status: str) -> None:
        self.ends.append(status)


class Evaluated(Plain):
    """Logs in its evaluation steps, and logs a value that loggers must not receive."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"val_loss": 0.5, "hidden": 1.0}, logger=False)
        self.log("val_acc", float(batch_idx))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_acc", 0.25)

    def predict_step(self, batch: Any, batch_idx: int) -> float:
        return float(batch_idx)


def test_results_of_validate_and_test_are_told_as_under_lightning(tmp_path: Path) -> None:
    def rows_of(make: Any) -> Any:
        logger, (train, val) = Told(), loaders()
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        made = make(max_epochs=2, logger=logger, default_root_dir=tmp_path, accelerator="cpu", devices=1, **quiet)
        model = Evaluated()
        made.validate(model, val, verbose=False)
        fresh, before = logger.rows[:], len(logger.rows)
        made.fit(model, train, val)
        before = len(logger.rows)
        made.validate(model, val, verbose=False)
        made.test(model, val, verbose=False)
        made.predict(model, val, return_predictions=False)
        return fresh, logger.rows[before:], logger.ends, set(made.logged_metrics)

    ours = rows_of(fp.Trainer)
    assert ours == rows_of(pl.Trainer)
    assert [step for step, _ in ours[1]] == [20, 20]


def test_a_trainer_gives_back_the_loggers_that_it_was_given(make_trainer: Any, tmp_path: Path) -> None:
    first, second = CSVLogger(tmp_path / "first"), Told()
    trainer = make_trainer(logger=[first, second], max_epochs=1)
    assert trainer.loggers == [first, second]
    assert trainer.logger is first

    trainer.logger = second
    model = Plain()
    trainer.fit(model, *loaders())
    assert model.loggers == [second]
    assert second.rows
    assert second.ends == ["success"]
    assert not (tmp_path / "first").exists()
    trainer.logger = None
    trainer.validate(model, loaders()[1], verbose=False)
    assert (trainer.logger, trainer.loggers, second.ends) == (None, [], ["success"])
    trainer.loggers = ["nothing"]
    with pytest.raises(fp.ConfigError, match="got str"):
        trainer.fit(model, *loaders())


class Elsewhere(Told):
    save_dir = "elsewhere"


def test_log_dir_is_that_of_the_first_logger_of_lightnings(tmp_path: Path) -> None:
    def seen(make: Any, *given: Any) -> list[Any]:
        quiet = {"enable_progress_bar": False, "accelerator": "cpu", "max_epochs": 1, "default_root_dir": tmp_path}
        return [make(logger=logger, **quiet).log_dir for logger in given]

    loggers = CSVLogger(tmp_path / "a"), TensorBoardLogger(tmp_path / "b", "x", 3), Elsewhere()
    ours = seen(fp.Trainer, *loggers, False)
    assert ours == seen(pl.Trainer, *loggers, False)
    assert ours[1] == str(tmp_path / "b/x/version_3")
    assert seen(fp.Trainer, fp.CSV(), [fp.CSV(), loggers[0]]) == [str(tmp_path)] * 2


def test_under_fast_dev_run_a_logger_takes_everything_and_keeps_nothing(make_trainer: Any, tmp_path: Path) -> None:
    class Talkative(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.experiment.add_scalar("x", 1.0)
            self.logger.log_metrics({"x": 1.0}, step=1)
            self.logger.experiment["deep"]["er"] = 1
            with self.logger.experiment.part() as part:
                part.log(1)
            assert not list(self.logger.experiment)
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(fast_dev_run=True, logger=TensorBoardLogger(tmp_path / "logs"))
    trainer.fit(Talkative(), *loaders())
    assert trainer.global_step == 1
    assert not (tmp_path / "logs").exists()
    assert make_trainer(fast_dev_run=True, logger=False).logger is None


def test_a_hook_of_a_logger_that_is_not_called_is_named(caplog: Any, tmp_path: Path) -> None:
    class Uploads(CSVLogger):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None: ...

    translate_logger(CSVLogger(tmp_path))
    assert not caplog.records
    translate_logger(Uploads(tmp_path))
    assert "Uploads.after_save_checkpoint() is not called" in caplog.text
