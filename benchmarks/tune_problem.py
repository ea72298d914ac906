"""The problem of `tune.py`: a small network that classifies the rows of a table, and its search space.

A random network has labelled the rows, some of them wrongly. The score is the share of the validation rows that the trained
network labels as the table does. All contestants read the same Parquet files, and train with the same network, optimizer
and loader. The order of the rows and the first weights are the same, too, so the same hyperparameters have the same scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FEATURES, CLASSES = 32, 10
BATCH = 128
VALIDATION_ROWS = 4_000
# Share of the labels that are random.
WRONG = 0.1
TRAIN, VALIDATION = "train.parquet", "validation.parquet"
# The search space.
LR, WEIGHT_DECAY, WIDTHS = (1e-5, 1.0), (1e-6, 1e-1), (32, 64, 128, 256)

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Hyperparameters:
    """What is tuned."""

    lr: float
    width: int
    weight_decay: float


class Rows(Dataset[Batch]):
    """The rows of a file in memory. A loader gets the rows of a batch at once."""

    def __init__(self, file: Path) -> None:
        table = pq.read_table(file)
        columns = [table[f"x{column}"].to_numpy() for column in range(FEATURES)]
        self.x = torch.from_numpy(np.stack(columns, axis=1))  # (rows, features)
        self.y = torch.from_numpy(table["label"].to_numpy().copy())  # (rows,)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Batch:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.x[indices], self.y[indices]


def make_table(place: Path, rows: int) -> None:
    """Write the training rows and the validation rows into a directory."""
    drawn = np.random.default_rng(0)
    hidden = drawn.standard_normal((FEATURES, 24)) / np.sqrt(FEATURES) * 2
    output = drawn.standard_normal((24, CLASSES))
    for name, count in ((TRAIN, rows), (VALIDATION, VALIDATION_ROWS)):
        x = drawn.standard_normal((count, FEATURES)).astype(np.float32)
        labels = (np.tanh(x @ hidden) @ output).argmax(axis=1)
        wrong = drawn.random(count) < WRONG
        labels[wrong] = drawn.integers(0, CLASSES, wrong.sum())
        columns = {f"x{column}": x[:, column] for column in range(FEATURES)}
        pq.write_table(pa.table({**columns, "label": labels}), place / name)


def loader(rows: Rows) -> DataLoader[Batch]:
    """The batches of an epoch, in an order that follows from the number of the epoch alone."""
    order = DistributedSampler(rows, num_replicas=1, rank=0, seed=0)
    return DataLoader(rows, batch_size=BATCH, sampler=order, collate_fn=tuple)


def network(width: int) -> torch.nn.Module:
    """The network with a number of hidden units in each of its two hidden layers."""
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, width), torch.nn.ReLU(),
        torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, CLASSES),
    )  # fmt: skip


def optimizer(net: torch.nn.Module, tried: Hyperparameters) -> torch.optim.Optimizer:
    """The optimizer of a network."""
    return torch.optim.AdamW(net.parameters(), lr=tried.lr, weight_decay=tried.weight_decay)


def loss(net: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of a batch."""
    x, y = batch
    return functional.cross_entropy(net(x), y)


def score(net: torch.nn.Module, batch: Batch) -> float:
    """The share of the rows whose label the network finds."""
    x, y = batch
    return float((net(x).argmax(dim=1) == y).float().mean())


def train(tried: Hyperparameters, place: Path, epochs: int) -> Iterator[float]:
    """Train in a plain loop, and yield the score after each epoch.

    Args:
        tried: the hyperparameters.
        place: the directory of the files.
        epochs: their number.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batches, validation = loader(Rows(place / TRAIN)), Rows(place / VALIDATION)
    net = network(tried.width)
    steps = optimizer(net, tried)
    for epoch in range(epochs):
        batches.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in batches:
            steps.zero_grad()
            loss(net, batch).backward()
            steps.step()
        with torch.no_grad():
            yield score(net, (validation.x, validation.y))
