"""Modules and comparisons of the trainer's tests with XLA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models.small import Classifier
from torch import nn


class Steady(Classifier):
    """Uses no random numbers, so that torch and XLA can be compared. SGD's steps don't magnify rounding."""

    def __init__(self, every: str = "step") -> None:
        super().__init__()
        self.net[2] = nn.Tanh()
        self.every = every

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", (logits.argmax(1) == batch[1]).float().mean(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
        if self.every == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.97)
        return [optimizer], [{"scheduler": schedule, "interval": self.every}]


def worst(module: nn.Module, wanted: nn.Module) -> float:
    """Largest difference between the states of two modules."""
    mine, theirs = module.state_dict(), wanted.state_dict()
    return max(float((mine[name].double() - theirs[name].double()).abs().max()) for name in mine)


def equal(actual: Any, wanted: Any) -> bool:
    """Return True if two nested states agree bit for bit."""
    if isinstance(actual, torch.Tensor):
        return torch.equal(actual, wanted)
    if isinstance(actual, dict):
        return actual.keys() == wanted.keys() and all(equal(actual[key], wanted[key]) for key in actual)
    if isinstance(actual, (list, tuple)):
        return len(actual) == len(wanted) and all(equal(a, b) for a, b in zip(actual, wanted, strict=True))
    return bool(actual == wanted)
