"""`FashionNet`: the demo's model, with all code that a user of Footplate writes for one.

A batch is `{"image": uint8 (B, 1, 28, 28), "label": integer (B,)}`, from the table's loader. Scaling and augmentation are
tensor operations inside the module, so they run on the device, and an exported model accepts raw pixels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import footplate as fp

PIXEL_MEAN, PIXEL_STD = 0.2860, 0.3530
"""Mean and standard deviation of the 60,000 original training images, with pixels scaled to 0 … 1."""

# In pixels.
MAX_SHIFT = 1


class FashionNet(fp.Module):
    """A small convolutional classifier of 28 × 28 greyscale images.

    Args:
        lr: the peak learning rate, reached after a tenth of the training.
        weight_decay: the weight decay of AdamW.
        width: the channels of the first convolution; the next two have twice and four times as many.
        classes: the number of classes.
    """

    def __init__(self, lr: float = 3e-3, weight_decay: float = 0.05, width: int = 24, classes: int = 10):
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
        self.net = nn.Sequential(
            shrink(1, width),  # (B, width, 14, 14)
            shrink(width, 2 * width),  # (B, 2 width, 7, 7)
            Refine(2 * width),
            shrink(2 * width, 4 * width),  # (B, 4 width, 3, 3)
            Refine(4 * width),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(4 * width * 3 * 3, classes),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Compute logits (B, classes) of raw images, uint8 (B, 1, 28, 28)."""
        return self.net((image.to(self.dtype) / 255 - PIXEL_MEAN) / PIXEL_STD)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Compute the loss of an augmented batch."""
        loss = F.cross_entropy(self(augment(batch["image"])), batch["label"].long())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss and the accuracy of a batch."""
        logits, label = self(batch["image"]), batch["label"].long()
        self.log("val_loss", F.cross_entropy(logits, label), prog_bar=True)
        self.log("val_acc", (logits.argmax(1) == label).float().mean(), prog_bar=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Predict the most probable class (B,) of every image, with its probability (B,)."""
        probability, prediction = self(batch["image"]).softmax(1).max(1)
        return {"label": batch["label"], "prediction": prediction, "probability": probability}

    def configure_optimizers(self) -> dict[str, Any]:
        """Make AdamW with a learning rate that warms up and then falls along a cosine, step by step."""
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr, weight_decay=self.hparams.weight_decay)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Refine(nn.Module):
    """A residual block: it adds a convolution of its input to it. The shape (B, channels, H, W) stays."""

    def __init__(self, channels: int):
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Add the convolution of the input to it."""
        return x + F.relu(self.norm(self.convolution(x)))


def shrink(channels_in: int, channels_out: int) -> nn.Sequential:
    """Convolution, pooling to half the size, normalisation, ReLU. Pooling first makes the last two four times cheaper."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


def augment(image: Tensor) -> Tensor:
    """Mirror each image of (B, C, H, W) with probability ½, and shift it by up to `MAX_SHIFT` pixels each way.

    A shift fills the uncovered pixels with background (zeros).
    """
    batch, _, height, width = image.shape
    mirror = torch.rand(batch, 1, 1, 1, device=image.device) < 0.5
    image = torch.where(mirror, image.flip(3), image)

    shift = torch.randint(0, 2 * MAX_SHIFT + 1, (2, batch, 1, 1), device=image.device)
    rows = shift[0] + torch.arange(height, device=image.device).view(1, -1, 1)  # (B, H, 1)
    columns = shift[1] + torch.arange(width, device=image.device).view(1, 1, -1)  # (B, 1, W)
    padded = F.pad(image, (MAX_SHIFT,) * 4)
    sample = torch.arange(batch, device=image.device).view(-1, 1, 1)
    # The two indices around the channel dimension put it last: (B, H, W, C).
    return padded[sample, :, rows, columns].permute(0, 3, 1, 2)


def warmup_cosine(step: int, steps: int) -> float:
    """The learning rate at `step` of `steps`, as a part of its peak: linear up for a tenth, then a cosine down to 0."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.5 * (1 + math.cos(math.pi * progress))
