"""A module whose base is frozen, as in fine-tuning with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import footplate as fp

FROZEN = {f"base.{layer}.{part}" for layer in (0, 1, 2) for part in ("weight", "bias")}


class Adapted(fp.Module):
    """A frozen base with a batch norm, and a small layer that learns.

    Args:
        base_seed: of the weights of the base, which stand for pretrained ones.
        unfreeze_at: the epoch in which the base learns, too.
    """

    def __init__(self, base_seed: int = 0, unfreeze_at: int | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng():
            torch.manual_seed(base_seed)
            self.base = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
            torch.manual_seed(0)
            self.adapter = nn.Linear(8, 1)

    def on_train_epoch_start(self) -> None:
        self.base[1].requires_grad_(self.current_epoch == self.hparams["unfreeze_at"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.adapter(self.base(batch)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(
    module: fp.Module, directory: Path, epochs: int = 2, ckpt_path: str | None = None, **arguments: Any
) -> fp.Trainer:
    """Train on 32 rows. Checkpoints leave out frozen weights."""
    trainer = fp.Trainer(
        max_epochs=epochs, default_root_dir=directory, logger=False, enable_progress_bar=False, seed=1,
        **{"save_frozen_weights": False, "accelerator": "cpu", **arguments},
    )  # fmt: skip
    rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader(rows, batch_size=8), ckpt_path=ckpt_path)
    return trainer


def last(directory: Path) -> Path:
    return directory / "checkpoints" / "last.ckpt"
