"""Records of a `fit`, the weights that it ends with, and a module without dropout."""

from __future__ import annotations

import torch
from models.small import Classifier

import footplate as fp


class Watch(fp.Callback):
    """Records the progress of training and evaluation."""

    def __init__(self) -> None:
        self.labels: list[list[int]] = []
        self.losses: list[float] = []
        self.validated_at: list[int] = []
        self.evaluated: list[str] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.labels.append(batch[1].tolist())
        self.losses.append(float(outputs))

    def on_validation_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.validated_at.append(trainer.progress.batches)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.evaluated.append("sanity" if trainer.sanity_checking else "val")

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.evaluated.append("test")

    def on_predict_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.evaluated.append("predict")


class Plain(Classifier):
    """No dropout, plain SGD: its result can be computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = torch.nn.Identity()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def final(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
