"""The monitor on a GPU: phases with the time of their kernels, the host's share, memory, and the share of the peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.small import Classifier, loader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp
from footplate.core.goodput import NAME, read_rows
from footplate.training import monitor

WIDTH, ROWS = 4096, 2048


class Large(fp.Module):
    """Ten large matrix products: the GPU is busy for much longer than the host needs to launch them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(10)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(monitor, "LEAST_S", 0.0)
    monkeypatch.setattr(monitor, "LOOK_S", 0.05)
    monkeypatch.setattr(monitor, "STEPS_BETWEEN_LOOKS", 3)
    monkeypatch.setattr(monitor, "WINDOW_S", 0.1)


@pytest.mark.alone
def test_a_model_that_is_too_small_for_the_gpu_is_told_so(make_trainer):
    trainer = make_trainer(max_time="00:00:00:03", max_epochs=-1, enable_checkpointing=False)
    trainer.fit(Classifier(), loader())
    assert trainer.monitor.evidence.launching > 0.5
    assert "small_for_gpu" in {advice.rule for advice in trainer.monitor.advice}


@pytest.mark.alone
def test_a_large_model_keeps_the_gpu_busy_and_has_a_share_of_its_peak(make_trainer, tmp_path):
    data = DataLoader(TensorDataset(torch.randn(ROWS * 4, WIDTH)), ROWS)
    trainer = make_trainer(
        max_time="00:00:00:05", max_epochs=-1, enable_checkpointing=False, deterministic=False, logger=fp.CSV()
    )
    trainer.fit(Large(), data)
    evidence = trainer.monitor.evidence
    assert evidence.launching < 0.5
    assert "small_for_gpu" not in {advice.rule for advice in trainer.monitor.advice}
    assert all(evidence.share(phase) > 0 for phase in ("forward", "backward", "optimizer"))
    # A backward pass has twice the products of a forward pass, but for the first layer's.
    assert evidence.flops == pytest.approx(3 * 10 * 2 * ROWS * WIDTH**2, rel=0.1)
    assert evidence.device_memory_bytes > 10 * WIDTH**2 * 4 * 2
    rows, _ = read_rows(tmp_path / "run" / NAME)
    windows = [row for row in rows if row["kind"] == "window" and row["flops"]]
    rates = [row["flops"] / row["wall_s"] for row in windows[1:]]
    assert evidence.peak_flops_per_s is not None, f"the catalog has no peak rate of {torch.cuda.get_device_name()}"
    assert 0.05 < max(rates) / evidence.peak_flops_per_s <= 1.0
