"""The time of a step's phases on a GPU, with a clock in the GPU's place."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from footplate.core.time_split import TimeSplit
from footplate.step.phase_times import PhaseTimes

KERNELS_S = 0.05


class OnGpu:
    """A step whose host needs no time and whose kernels do: `backpropagate` has another phase inside."""

    shows_phases = False
    bare = True

    def __init__(self) -> None:
        self.spec = SimpleNamespace(device=torch.device("cuda", 0), times=TimeSplit("step"))

    def show_phases(self) -> None: ...

    def forward(self) -> None: ...

    def differentiate(self) -> None: ...

    def backpropagate(self) -> None:
        self.differentiate()

    def step_by_closure(self) -> None: ...

    def end_window(self) -> None: ...

    def make_manual_step(self) -> None: ...


def test_the_host_is_not_said_to_launch_while_it_waits_for_kernels_of_an_inner_phase(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: time.sleep(KERNELS_S))
    step = OnGpu()
    with PhaseTimes(step) as times:
        step.forward()
        step.backpropagate()
        step.end_window()
    assert times.launching_s is not None
    assert times.launching_s < KERNELS_S / 2
    assert times.seconds["backward"] == pytest.approx(2 * KERNELS_S, rel=0.5)
