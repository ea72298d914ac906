"""The names of compiled functions, by which a profile finds the step of a program."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch
from training.profiled_nets import Wide

from footplate.step.xla.capture import capture_training
from footplate.step.xla.lowering.data_parallel import mesh_of
from footplate.step.xla.runtime.program import Program


def name(width: int = 4, rows: int = 8, dtype: torch.dtype = torch.float32, devices: int = 1, **settings: Any) -> str:
    module = Wide(width).to(dtype)
    captured = capture_training(
        module, module.configure_optimizers(), torch.ones(rows // devices, width, dtype=dtype), **settings
    )
    return Program(captured, mesh_of(jax.devices()[:devices]), devices, whole=False, sharded=False).name


def test_the_same_computation_has_the_same_name():
    assert name() == name()
    assert name().startswith("training_step_")


@pytest.mark.parametrize(
    "other",
    [
        {"width": 5}, {"rows": 16}, {"dtype": torch.float64}, {"devices": 2, "rows": 16}, {"gradient_clip_val": 1.0},
        {"ends_window": False, "accumulate_grad_batches": 2},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_another_computation_has_another_name(other: dict[str, Any]):
    assert name(**other) != name()
