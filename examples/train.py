"""The model of `footplate fit --config examples/run.yaml`. Run that from the root of the repository."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import footplate as fp


class Net(fp.Module):
    """A perceptron for small greyscale images.

    Args:
        lr: the learning rate.
        hidden: the width of the hidden layer.
    """

    def __init__(self, lr: float = 1e-3, hidden: int = 128) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, image: Tensor) -> Tensor:  # uint8 (B, 1, 28, 28) → logits (B, 10)
        return self.net(image.float() / 255)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["image"]), batch["label"].long())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits, label = self(batch["image"]), batch["label"].long()
        self.log("val_loss", F.cross_entropy(logits, label), prog_bar=True)
        self.log("val_acc", (logits.argmax(1) == label).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
