"""Lightning's command line with our trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler
from models.zoo import Plain, loaders

import footplate as fp
from footplate.compat.lightning.cli import LightningCLI


class Mine(fp.Trainer):
    """A user's trainer."""


class WithData(Plain):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def train_dataloader(self) -> Any:
        return loaders()[0]

    def val_dataloader(self) -> Any:
        return loaders()[1]


@pytest.mark.parametrize("trainer_class", [fp.Trainer, Mine])
def test_callbacks_and_loggers_of_a_file_may_be_lightnings_or_ours(trainer_class: Any, tmp_path: Path) -> None:
    callbacks = [
        {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val_loss"}},
        {"class_path": "footplate.callbacks.LearningRateMonitor", "init_args": {"logging_interval": "step"}},
    ]
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path)}}
    shown = {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(tmp_path / "run")}
    settings = {"max_epochs": 1, "accelerator": "cpu", "callbacks": callbacks, "logger": logger, **shown}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": settings, "model": {"scale": 0.5}}))

    cli = LightningCLI(
        WithData,
        trainer_class=trainer_class,
        args=["fit", "--config", str(tmp_path / "config.yaml"), "--trainer.limit_train_batches", "3"],
    )

    assert type(cli.trainer) is trainer_class
    assert (cli.trainer.global_step, cli.model.scale) == (3, 0.5)
    assert isinstance(cli.trainer.early_stopping_callback, EarlyStopping)
    assert any(type(callback) is fp.LearningRateMonitor for callback in cli.trainer.callbacks)
    assert isinstance(cli.trainer.logger, CSVLogger)


def test_short_names_stay_lightnings_when_a_trainer_has_been_made_with_such_a_callback(tmp_path: Path) -> None:
    fp.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, callbacks=[ModelCheckpoint()])
    arguments = ["--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.monitor=val_loss"]
    profiler = ["--trainer.profiler=AdvancedProfiler", "--trainer.profiler.line_count_restriction=0.5"]
    cli = LightningCLI(WithData, run=False, args=[*arguments, *profiler, f"--trainer.default_root_dir={tmp_path}"])
    assert isinstance(cli.trainer.checkpoint_callback, ModelCheckpoint)
    assert cli.trainer.checkpoint_callback.monitor == "val_loss"
    assert isinstance(cli.trainer.profiler, AdvancedProfiler)


def test_callbacks_of_trainer_defaults_may_be_given_as_in_a_file(tmp_path: Path) -> None:
    saver = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"monitor": "val_loss"}}
    for callbacks in (saver, [saver]):
        cli = LightningCLI(
            WithData,
            run=False,
            args=[f"--trainer.default_root_dir={tmp_path}"],
            trainer_defaults={"callbacks": callbacks},
        )
        assert [callback.monitor for callback in cli.trainer.callbacks if isinstance(callback, ModelCheckpoint)] == [
            "val_loss"
        ]
