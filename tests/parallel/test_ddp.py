"""Data parallelism: several ranks with a share of each batch learn what one process with all of it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ranks
from models.small import dataset
from torch import nn
from torch.utils.data import DataLoader

import footplate as fp


class Plain(fp.Module):
    """No dropout, so that it does not matter which rank a row is on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(root, batch_size, rows=50, module=Plain, **settings):
    torch.manual_seed(0)
    settings = {"max_epochs": 3, "logger": False, "enable_checkpointing": False, **settings}
    trainer = fp.Trainer(accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, seed=1,
                         default_root_dir=root, **settings)  # fmt: skip
    model = module()
    loader = DataLoader(dataset(rows), batch_size, shuffle=True)
    trainer.fit(model, loader, DataLoader(dataset(33), batch_size))
    return {"weights": model.state_dict(), "metrics": dict(trainer.callback_metrics), "step": trainer.global_step}


def same(one, other):
    for name, value in one["weights"].items():
        torch.testing.assert_close(value, other["weights"][name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_two_ranks_learn_what_one_process_with_the_global_batch_learns(settings, tmp_path):
    alone = train(tmp_path / "alone", 16, **settings)
    first, second = ranks.run(lambda: train(tmp_path / "two", 8, **settings), 2)
    same(alone, first)
    same(first, second)
    assert first["step"] == alone["step"]
    for name in ("val_loss", "train_loss_epoch"):
        assert first["metrics"][name] == second["metrics"][name]
        assert float(first["metrics"][name]) == pytest.approx(float(alone["metrics"][name]), rel=1e-4)
