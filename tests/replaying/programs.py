"""A training that tells what it saw: the ids, losses and gradients of each step, as attributes or in files of its ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import footplate as fp

ROWS = 150


def columns(start: int, stop: int) -> dict[str, np.ndarray]:
    ids = np.arange(start, stop)
    noise = np.random.default_rng(start).normal(size=(2, stop - start)).astype(np.float32)
    return {"id": ids, "a": noise[0], "b": noise[1]}


def rows(start: int = 0, stop: int = ROWS) -> pa.Table:
    return pa.table(columns(start, stop))


class Seeing(fp.Module):
    """A model with dropout and batch norm, whose learning rate follows a schedule.

    Args:
        directory: each rank appends the ids of every batch to a file in it.
        skips: batches that make no step.
    """

    def __init__(self, directory: Path | None = None, skips: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 1)
        )
        self.directory = directory
        self.skips = skips
        self.ids: dict[int, list[list[int]]] = {}
        self.losses: dict[int, list[torch.Tensor]] = {}
        self.gradients: dict[int, dict[str, torch.Tensor]] = {}

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (self.net(torch.stack([batch["a"], batch["b"]], 1)) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        if self.trainer.progress.batches in self.skips:
            return None
        step = self.trainer.global_step + 1
        loss = self.loss(batch)
        self.ids.setdefault(step, []).append(batch["id"].tolist())
        self.losses.setdefault(step, []).append(loss.detach().clone())
        if self.directory is not None:
            seen = {"step": step, "ids": batch["id"].tolist(), "loss": loss.item().hex()}
            with (self.directory / f"rank-{self.trainer.world.rank}").open("a") as file:
                file.write(json.dumps(seen) + "\n")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        step = self.trainer.global_step + 1
        self.gradients[step] = {name: parameter.grad.clone() for name, parameter in self.named_parameters()}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def trainer(run_dir: Path, save_every: int = 5, **arguments: Any) -> fp.Trainer:
    """A quiet trainer that keeps a checkpoint of every few steps."""
    callbacks = [*arguments.pop("callbacks", []), fp.ModelCheckpoint(every_n_train_steps=save_every, save_top_k=-1)]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "seed": 7}
    return fp.Trainer(**{"default_root_dir": run_dir, "max_epochs": 3, "callbacks": callbacks, **quiet, **arguments})


def seeing(**arguments: Any) -> Seeing:
    """The same model each time."""
    torch.manual_seed(3)
    return Seeing(**arguments)
