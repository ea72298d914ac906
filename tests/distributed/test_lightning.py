"""LightningModules and Lightning's callbacks, unchanged, on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from models import ranks
from models.small import dataset
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .common import equal, loader, make, same, seeded, weights


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0][:, 0]

    @rank_zero_only
    def write(self, path: Path) -> None:
        with path.open("a") as file:
            file.write(f"{self.global_rank} of {self.trainer.world_size}\n")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(root: Path, batch_size: int, module: type = Lit, **settings: Any) -> Any:
    model, trainer = seeded(module), make(root, **settings)
    trainer.fit(model, loader(50, batch_size), loader(33, batch_size))
    model.write(root / "written")
    return trainer.parallel.whole(weights(model)), float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_lightning_module_learns_on_two_ranks_what_it_learns_alone(strategy, tmp_path):
    alone = train(tmp_path / "alone", 16)
    first, second = ranks.run(lambda: train(tmp_path / "two", 8, strategy=strategy), 2)
    same(alone[0], first[0])
    equal(first[0], second[0])
    assert first[1] == second[1] == pytest.approx(alone[1], rel=1e-4)


class Cut(Lit):
    """Cuts and shards its layers as in Lightning's guide to tensor parallelism."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is not None:
            parallelize_module(self.net, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fully_shard(self.net, mesh=mesh["data_parallel"])


def test_a_lightning_module_may_cut_its_layers(tmp_path):
    alone = train(tmp_path / "alone", 16)

    def run():
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
        return train(tmp_path / "four", 8, module=Cut, strategy=strategy)

    for weights_of_rank, val_loss in ranks.run(run, 4):
        same(alone[0], weights_of_rank)
        assert val_loss == pytest.approx(alone[1], rel=1e-4)


class LooksInSetup(Cut):
    """Keeps the shape of the grid that it finds in `setup`, where loaders are often made."""

    def setup(self, stage: str) -> None:
        self.grid = None if self.device_mesh is None else self.device_mesh.mesh.shape


def test_a_lightning_module_has_the_grid_of_ranks_in_setup(tmp_path):
    def run():
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
        trainer, model = make(tmp_path, strategy=strategy), seeded(LooksInSetup)
        trainer.validate(model, loader(16))
        return model.grid

    assert ranks.run(run, 2) == [(1, 2)] * 2


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("epoch")
        self.found: list[tuple[int, float]] = []

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        for rows, values in zip(batch_indices[0], predictions, strict=True):
            self.found += zip(rows, values.tolist(), strict=True)


def test_a_prediction_writer_learns_which_rows_a_rank_has_predicted(tmp_path):
    def run():
        writer = Writer()
        make(tmp_path, callbacks=writer).predict(seeded(Lit), loader(37, 4, shuffle=False))
        return writer.found

    first, second = ranks.run(run, 2)
    predictions = dict(first + second)
    assert len(first) + len(second) == len(predictions) == 37
    assert predictions == pytest.approx(dict(enumerate(dataset(37).tensors[0][:, 0].tolist())))


class LitThatLogs(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_lightning_module_is_copied_for_replicas_with_its_log(tmp_path):
    trained = {}
    for devices in (1, 2):
        model = seeded(LitThatLogs)
        trainer = make(tmp_path / str(devices), devices=devices, strategy="replicas")
        trainer.fit(model, loader(51, 16))
        trained[devices] = weights(model), float(trainer.callback_metrics["train_loss"])
    same(trained[1][0], trained[2][0])
    assert trained[1][1] == pytest.approx(trained[2][1], rel=1e-5)
