"""Statistical test of XLA's dropout in training. It counts drops, because the draws differ from torch's by construction.

A trainer on eight virtual devices trains one weight for each column of a layer of dropout over ones. A weight's gradient
counts the kept numbers of its column on all devices. With independent draws these counts are binomial:

- Their mean tests the rate.
- Their variance tests that rows and devices draw independently. If all devices drew alike, it would be eight times as
  large.
- The correlation of two consecutive steps tests that each step draws new numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import footplate as fp

P, DEVICES, ROWS, COLUMNS, STEPS = 0.25, 8, 64, 2048, 50
SIGMAS = 5.0


class Dropped(fp.Module):
    """One weight for each column of the output of dropout over ones."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(P)
        self.weights = nn.Parameter(torch.zeros(COLUMNS, dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.dropout(batch) * self.weights).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Weights(fp.Callback):
    """Records the weights after each step."""

    def __init__(self) -> None:
        self.seen = [torch.zeros(COLUMNS, dtype=torch.float64)]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(pl_module.weights.detach().cpu().clone())


@dataclass(frozen=True)
class Draws:
    """The statistics, and their distance from the expected values in standard errors.

    Attributes:
        dropped: the share of dropped numbers.
        mean: the mean of dropout's output for ones.
        variance: the variance of the counts, as a multiple of the binomial variance.
        correlation: the correlation of the counts of consecutive steps.
        sigmas: the largest distance of these four from p, 1, 1 and 0, in standard errors.
    """

    dropped: float
    mean: float
    variance: float
    correlation: float
    sigmas: float


def counted(kept: Tensor, numbers: int, p: float) -> Draws:
    """Compute the statistics of counts.

    Args:
        kept: the number of kept values, (steps, columns).
        numbers: the number of values behind each count.
        p: the expected drop rate.
    """
    kept = kept.double()
    share, variance = kept.mean() / numbers, kept.var() / (numbers * p * (1 - p))
    correlation = torch.corrcoef(torch.stack([kept[:-1].flatten(), kept[1:].flatten()]))[0, 1]
    of_rate = (share - (1 - p)) / (p * (1 - p) / (numbers * kept.numel())) ** 0.5
    of_variance = (variance - 1) / (2 / kept.numel()) ** 0.5
    of_correlation = correlation * kept[1:].numel() ** 0.5
    sigmas = torch.stack([of_rate, of_variance, of_correlation]).abs().max()
    values = (1 - share, share / (1 - p), variance, correlation, sigmas)
    return Draws(*(value.item() for value in values))


def draws() -> Draws:
    """Train, and compute the statistics."""
    weights = Weights()
    trainer = fp.Trainer(
        accelerator="xla",
        devices=DEVICES,
        precision="64-true",
        max_steps=STEPS,
        max_epochs=-1,
        seed=0,
        callbacks=[weights],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Dropped(), [torch.ones(DEVICES * ROWS, COLUMNS, dtype=torch.float64)] * STEPS)
    gradients = -torch.stack(weights.seen).diff(dim=0)  # (steps, columns), averaged over devices
    return counted((gradients * DEVICES * (1 - P)).round(), DEVICES * ROWS, P)
