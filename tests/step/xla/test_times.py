"""Where the time of compiled steps goes: what the monitor knows of them, and when the devices wait for the host."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from models.small import Classifier, loader
from torch import nn
from torch.utils.data import DataLoader

import footplate as fp
from footplate.core.goodput import NAME, read_rows
from footplate.hardware.xla import XLA
from footplate.step.xla.runtime.batch_placement import BatchPlacement
from footplate.step.xla.runtime.xla_step import XLAStep
from footplate.training import monitor

# The time to move a batch.
SLOW_S = 0.01


@pytest.fixture
def measured(make_trainer, monkeypatch, tmp_path):
    """Train with XLA; return the monitor, and the windows of its record."""
    for name in ("LOOK_S", "STEPS_BETWEEN_LOOKS", "WINDOW_S", "LEAST_S"):
        monkeypatch.setattr(monitor, name, 0.0)

    def train(module: Any, batches: Any, *loaders: Any, **settings: Any) -> Any:
        settings = {"accelerator": "xla", "max_epochs": 2, "logger": fp.CSV(), "log_every_n_steps": 1, **settings}
        trainer = make_trainer(**settings)
        trainer.fit(module, batches, *loaders)
        windows = [row for row in read_rows(tmp_path / "run" / NAME)[0] if row["kind"] == "window"]
        return trainer.monitor, windows, trainer.run.step

    return train


class Products(fp.Module):
    """Products that take some milliseconds, so that JAX computes them in another thread than the caller's."""

    def __init__(self, width: int = 384) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_the_times_of_a_compiled_step_sum_up_and_have_no_phases(measured):
    observed, windows, _ = measured(Classifier(), loader(), loader(20))
    for window in windows:
        assert sum(window["seconds"].values()) == pytest.approx(window["wall_s"], abs=1e-6)
    assert {"compilation", "step", "transfer", "validation", "checkpoint"} <= set(observed.seconds)
    assert not {"forward", "backward", "optimizer"} & set(observed.seconds)


def test_compilation_has_its_own_time_and_count_also_in_validation(measured):
    shapes = [(torch.randn(rows, 8), torch.zeros(rows, dtype=torch.long)) for rows in (4, 5, 4)]
    observed, windows, step = measured(Classifier(), shapes, [shapes[:2]], num_sanity_val_steps=0)
    compiled_s = sum(program.seconds for program in step.compilations)
    assert len(step.compilations) == 4
    # It includes the captures, which happen before.
    assert compiled_s < observed.seconds["compilation"] < sum(observed.seconds.values())
    # The second form of training, and the second of validation.
    assert windows[-1]["recompilations"] == 2
    assert windows[0]["recompilations"] == 0


@pytest.mark.parametrize("steps", [1, 4])
def test_work_of_the_host_counts_only_while_the_devices_wait_for_it(measured, monkeypatch, steps):
    flat = BatchPlacement.flat
    monkeypatch.setattr(BatchPlacement, "flat", lambda self, batch: time.sleep(SLOW_S) or flat(self, batch))
    # Without workers, nothing is moved in advance.
    batches = DataLoader([torch.randn(8, 64)] * 8, batch_size=None)
    seconds = {}
    for busy in (False, True):
        monkeypatch.setattr(XLAStep, "idle", lambda self, busy=busy: not busy)
        # So that "idle" alone decides.
        monkeypatch.setattr(XLAStep, "_on_cpu", property(lambda self: False, lambda self, value: None), raising=False)
        observed, _, step = measured(Products(64), batches, iterations_per_loop=steps, logger=False)
        assert step.chunk_size == steps
        seconds[busy] = observed.seconds
    assert {"input", "transfer", "dispatch", "step"} <= set(seconds[False])
    assert not {"input", "dispatch"} & set(seconds[True])
    # The rest is the time of the transfer hooks, if there were any.
    assert seconds[False]["transfer"] > 16 * SLOW_S > 2 * seconds[True]["transfer"]


def test_programs_that_the_call_itself_computes_are_no_dispatch(measured):
    small, _, _ = measured(Classifier(), loader(), logger=False)
    large, _, _ = measured(Products(), [torch.randn(384, 384)] * 30, logger=False)
    assert large.seconds["dispatch"] < 0.5 * large.seconds["step"]
    assert small.seconds["step"] > 0.0


def test_the_share_of_the_peak_counts_all_devices_and_their_kind(measured, monkeypatch):
    assert XLA().peak_flops_per_s(torch.device("cpu"), "32-true") is None
    monkeypatch.setattr(XLA, "peak_flops_per_s", lambda self, device, precision: 1e9)
    observed, _, step = measured(Products(64), [torch.randn(8, 64)] * 20, devices=2)
    evidence = observed.evidence
    assert evidence.peak_flops_per_s == 2e9
    # Four layers forward and backward; the first needs no gradient of its input.
    assert evidence.flops == step.flops() == 2 * 8 * 64 * 64 * (4 * 3 - 1)
    assert evidence.mfu == pytest.approx(evidence.flops * 40 / evidence.wall_s / 2e9)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_profiler_of_actions_records_a_compiled_step_while_it_runs(make_trainer, steps):
    actions, open_in_capture = [], []

    class Records:
        def __init__(self) -> None:
            self.open: list[str] = []

        def start(self, action: str) -> None:
            actions.append(action)
            self.open.append(action)

        def stop(self, action: str) -> None:
            self.open.remove(action)

    class Net(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            open_in_capture.extend(profiler.open)
            return super().training_step(batch, batch_idx)

    profiler = Records()
    make_trainer(accelerator="xla", max_epochs=1, iterations_per_loop=steps, profiler=profiler).fit(Net(), loader())
    assert "run_training_batch" in open_in_capture
    assert actions.count("run_training_batch") == 12
    assert profiler.open == []
