"""Ranks that differ: all of them raise or decide together, and none waits for half an hour."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from models import ranks
from models.small import dataset
from torch import nn
from torch.utils.data import DataLoader, random_split

import footplate as fp

from .common import Plain, loader, make, seeded


def rank() -> int:
    return int(os.environ["RANK"])


class Wide(Plain):
    """A module of a different size on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.Linear(3, 3 + rank()))


class OwnRate(Plain):
    """A module with a different learning rate on each rank."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 + rank())


class OwnFreezing(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(rank() == 0)


class OwnOrder:
    """A batch sampler without a seed."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        rows = random.Random(os.urandom(8)).sample(range(48), 48)
        return (rows[start : start + 8] for start in range(0, 48, 8))


def own_part() -> DataLoader[Any]:
    torch.manual_seed(rank())
    return DataLoader(random_split(dataset(50), [40, 10])[0], 4)


DIFFERENT = {
    "callbacks": (lambda: {"callbacks": [fp.EarlyStopping("train_loss")] if rank() == 0 else []}, "save or stop"),
    "epochs": (lambda: {"max_epochs": 2 + rank()}, "max_epochs: rank 0 .* has 2, rank 1 .* has 3"),
    "model": (lambda: {"model": seeded(Wide)}, "the model"),
    "what learns": (lambda: {"model": seeded(OwnFreezing)}, "the model"),
    "learning rate": (lambda: {"model": seeded(OwnRate)}, r"SGD\(lr=0.1\).*SGD\(lr=1.1\)"),
    "rows": (lambda: {"data": loader(50 + 40 * rank())}, "50 rows.*90 rows"),
    "validation": (lambda: {"val": loader(50) if rank() == 0 else None}, "validation data.*has none"),
    "part": (own_part, r"training data.*40 rows of dataloader \(\w+\).*40 rows of dataloader \(\w+\)"),
    "order": (lambda: DataLoader(dataset(48), batch_sampler=OwnOrder()), "order of rows"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_between_ranks_and_would_let_them_part_is_said_on_all(name, tmp_path):
    make_it, what = DIFFERENT[name]

    def run():
        given = make_it()
        given = given if isinstance(given, dict) else {"data": given}
        model, data, val = given.pop("model", seeded()), given.pop("data", loader()), given.pop("val", None)
        with pytest.raises(fp.FootplateError, match=what) as caught:
            make(tmp_path, **given).fit(model, data, val)
        return str(caught.value)

    first, second = ranks.run(run, 2)
    assert first == second


def test_a_metric_that_rank_0_alone_logs_can_be_monitored(tmp_path):
    class Mine(Plain):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 0:
                self.log("mine", 1.0, rank_zero_only=True)
            return super().training_step(batch, batch_idx)

    def run():
        savers = [fp.EarlyStopping("mine", patience=2), fp.ModelCheckpoint(monitor="mine")]
        trainer = make(tmp_path, max_epochs=9, callbacks=savers)
        trainer.fit(seeded(Mine), loader())
        return trainer.current_epoch

    assert ranks.run(run, 2) == [3, 3]


def test_a_metric_that_no_rank_logs_is_named_on_all(tmp_path):
    def run():
        with pytest.raises(fp.ConfigError, match='"los", which nothing logs') as caught:
            make(tmp_path, callbacks=fp.EarlyStopping("los")).fit(seeded(), loader())
        return str(caught.value)

    assert len(set(ranks.run(run, 2))) == 1


def test_a_value_to_be_reduced_that_one_rank_alone_logs_is_reduced_over_those_that_have_it(tmp_path):
    class Some(Plain):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 1 and batch_idx == 1:
                self.log("seldom", 3.0, on_step=True, on_epoch=True, sync_dist=True)
            return super().training_step(batch, batch_idx)

    def run():
        trainer = make(tmp_path, log_every_n_steps=1)
        trainer.fit(seeded(Some), loader())
        return trainer.global_step, float(trainer.callback_metrics["seldom"])

    assert ranks.run(run, 2) == [(8, 3.0), (8, 3.0)]


def test_a_checkpoint_directory_that_is_not_writable_is_one_error_that_names_it(tmp_path):
    class Removes(fp.ModelCheckpoint):
        def setup(self, trainer, pl_module, stage):
            super().setup(trainer, pl_module, stage)
            if rank() == 0:
                (tmp_path / "there").rmdir()

    def run():
        with pytest.raises(fp.CheckpointError) as caught:
            make(tmp_path, callbacks=Removes(tmp_path / "there")).fit(seeded(), loader())
        return str(caught.value)

    for text in ranks.run(run, 2):
        assert f"{tmp_path}/there: no file can be made in this directory" in text
