"""Helpers of the tests with several ranks: a module without randomness, and a quiet trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models.small import dataset
from torch import nn
from torch.utils.data import DataLoader

import footplate as fp


class Plain(fp.Module):
    """A module without dropout, so that its results don't depend on the rank of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"first": batch[0][:, 0], "class": self.net(batch[0]).argmax(1)}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def make(root: Path, **settings: Any) -> fp.Trainer:
    """A quiet trainer."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 2, "seed": 1}
    return fp.Trainer(accelerator="cpu", default_root_dir=root, **{**quiet, **settings})


def loader(rows: int = 50, batch_size: int = 8, shuffle: bool = True) -> DataLoader[Any]:
    """Batches of one rank."""
    return DataLoader(dataset(rows), batch_size, shuffle)


def seeded(module: type = Plain) -> Any:
    """A module whose parameters are the same in every process."""
    torch.manual_seed(0)
    return module()


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that weights are equal except for the order of additions."""
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-6, msg=name)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that weights are equal to the last bit."""
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
