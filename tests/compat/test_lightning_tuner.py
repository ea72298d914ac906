"""Searches: our result equals Lightning's, and Lightning's Tuner and callbacks use our search."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from models.recording import Record, quiet, trainer_of
from models.zoo import Plain, loaders

import footplate as fp


class Searched(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.01, 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(loaders()[0].dataset, self.batch_size)

    val_dataloader = train_dataloader


@pytest.mark.parametrize("mode", ["exponential", "linear"])
def test_losses_rates_and_suggestion_are_lightnings(tmp_path: Path, make_trainer: Any, mode: Any) -> None:
    modules = [Searched(), Searched()]
    modules[1].load_state_dict(copy.deepcopy(modules[0].state_dict()))
    theirs = trainer_of("lightning", Record(), tmp_path)
    with quiet():
        expected = Tuner(theirs).lr_find(modules[0], loaders()[0], num_training=40, mode=mode)
    search = fp.Tuner(make_trainer()).lr_find(modules[1], loaders()[0], num_training=40, mode=mode)
    assert expected is not None
    assert search is not None
    assert search.results["lr"] == expected.results["lr"][: len(search.results["lr"])]
    assert search.results["loss"] == expected.results["loss"]
    assert search.suggestion() == expected.suggestion()
    assert modules[0].lr == modules[1].lr


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_the_batch_size_is_lightnings(tmp_path: Path, make_trainer: Any, mode: Any) -> None:
    class Full(Searched):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 19:
                raise RuntimeError("CUDA error: out of memory")
            return super().training_step(batch, batch_idx)

    modules = [Full(), Full(), Full()]
    with quiet():
        expected = Tuner(trainer_of("lightning", Record(), tmp_path)).scale_batch_size(modules[0], mode=mode)
    assert fp.Tuner(make_trainer()).scale_batch_size(modules[1], mode=mode) == expected
    assert modules[0].batch_size == modules[1].batch_size == expected


def test_lightnings_callback_searches_before_the_run(make_trainer: Any) -> None:
    module = Searched()
    finder = pl.callbacks.LearningRateFinder(num_training_steps=30)
    trainer = make_trainer(callbacks=[finder, pl.callbacks.BatchSizeFinder(max_trials=2)], max_epochs=1)
    trainer.fit(module)
    assert finder.optimal_lr is not None
    assert module.lr == finder.optimal_lr.suggestion()
    assert module.batch_size == 4
    assert trainer.optimizers[0].param_groups[0]["lr"] == module.lr
    assert trainer.progress.epoch == 1


def test_a_callback_that_searches_in_later_epochs_is_refused(make_trainer: Any) -> None:
    class Later(pl.callbacks.LearningRateFinder):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.lr_find(trainer, pl_module)

    with pytest.raises(
        fp.ConfigError, match=r"Later overrides a hook to search in the middle of a run.*footplate\.Tuner"
    ):
        make_trainer(callbacks=[Later()]).fit(Searched())


def test_lightnings_tuner_searches_with_ours_and_trains_nothing(make_trainer: Any) -> None:
    module, made = Searched(), make_trainer()
    before = copy.deepcopy(module.state_dict())
    search = Tuner(made).lr_find(module, num_training=30)
    assert search is not None
    assert len(search.results["loss"]) == 30
    assert Tuner(made).scale_batch_size(module, max_trials=3) == module.batch_size == 8
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert made.global_step == 0
    made.fit(module)
    assert made.global_step > 0
