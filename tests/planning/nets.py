"""A small module whose memory and operations can be counted by hand, and other models for plans."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp

WIDTH, CLASSES = 128, 10


class Small(fp.Module):
    """Two layers without biases: 128 → 128 → 10."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, CLASSES, bias=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.second(F.relu(self.first(x))), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batch(size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(size, WIDTH), torch.zeros(size, dtype=torch.int64)


class Batches(fp.DataModule):
    """Six batches of sixteen."""

    def train_dataloader(self):
        return DataLoader(TensorDataset(*batch(96)), batch_size=16)


class Scaled(nn.Module):
    """A model with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Pair(Scaled):
    """Returns more than one tensor."""

    def forward(self, x):
        return self.scale * x, 1


class Branch(Scaled):
    """Branches on the values of its input."""

    def forward(self, x):
        return self.scale * x if x.sum() > 0 else -x


class Total(Scaled):
    """Returns a single number."""

    def forward(self, x):
        return (self.scale * x).sum()


class Huge(nn.Linear):
    """160 GB of weights."""

    def __init__(self) -> None:
        super().__init__(200_000, 200_000, bias=False)


class HugeTable(nn.Embedding):
    """8 TB of weights, of which a text uses a few."""

    def __init__(self) -> None:
        super().__init__(2**31, 1024)


@dataclass
class Settings:
    """The settings of `Configured`."""

    words: int = 100


class Configured(nn.Sequential):
    """A model that is built from settings, as classes of transformers are."""

    config_class = Settings

    def __init__(self, config: Settings) -> None:
        super().__init__(nn.Embedding(config.words, WIDTH), nn.Linear(WIDTH, config.words))
