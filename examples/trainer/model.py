"""The model: a perceptron for small greyscale images."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import footplate as fp


class Net(fp.Module):
    def __init__(self, lr: float, hidden: int = 128) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, image: Tensor) -> Tensor:  # uint8 (B, 1, 28, 28) → logits (B, 10)
        return self.net(image.float() / 255)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["image"]), batch["label"].long())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits, label = self(batch["image"]), batch["label"].long()
        self.log("val_loss", F.cross_entropy(logits, label))
        self.log("val_acc", (logits.argmax(1) == label).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
