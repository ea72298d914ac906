"""A plan's predictions for a GPU, beside the measurements of a training on it."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import nn

import footplate as fp
from footplate.catalog.rows import catalog
from footplate.planning.library_models import Supervised

STEPS = 12


def here() -> str | None:
    """The catalog's name of this machine's first GPU."""
    about = torch.cuda.get_device_properties(0)
    return next(
        (
            row.short
            for row in catalog().accelerators.values()
            if row.kind == "gpu"
            and re.search(rf"\b{re.escape(row.short.split('-')[0])}\b", about.name)
            and abs(about.total_memory / (row.memory_gb * 1e9) - 1) < 0.1
        ),
        None,
    )


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    def block(width: int, wider: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, wider, 3, 2, 1, bias=False), nn.BatchNorm2d(wider), nn.ReLU())

    layers = [block(3, 64), block(64, 128), block(128, 256), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)]
    return nn.Sequential(*layers), torch.randn(256, 3, 160, 160)


def products() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 10)]
    return nn.Sequential(*layers), torch.randn(4096, 2048)


def attention() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 6), nn.Linear(512, 100)), torch.randn(32, 512, 512)


class Clock(fp.Callback):
    """Seconds of each step, including the wait for the device."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.synchronize()
        self.at.append(time.perf_counter())

    @property
    def fastest_s(self) -> float:
        return min(after - before for before, after in zip(self.at[1:], self.at[2:], strict=False))


# cuDNN chose algorithms with large workspaces, which no plan knows.
WORKSPACES = {(convolutions, "32"): 0.4, (convolutions, "bf16"): 0.4}


@pytest.mark.parametrize("precision", ["32", "bf16"])
@pytest.mark.parametrize("make", [convolutions, products, attention])
def test_memory_is_foretold_and_no_step_is_faster_than_the_least(make, precision, make_trainer):
    net, inputs = make()
    with torch.no_grad():
        shape = net(inputs[:1]).shape
    labels = torch.zeros(len(inputs), *shape[1:-1], dtype=torch.int64)
    (choice,) = fp.plan(Supervised(net), (inputs, labels), on=[here() or "H100"], precision=precision).choices
    clock, batch = Clock(), (inputs.pin_memory(), labels.pin_memory())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    runner = make_trainer(
        max_epochs=1, precision={"bf16": "bf16-mixed"}.get(precision, precision), deterministic=False, callbacks=[clock]
    )
    runner.fit(Supervised(net), [batch] * STEPS)
    found = torch.cuda.max_memory_allocated() - before
    assert choice.memory.peak == pytest.approx(found, rel=WORKSPACES.get((make, precision), 0.1))
    if here() and choice.roofline.step_s is not None:
        assert clock.fastest_s >= choice.roofline.step_s
