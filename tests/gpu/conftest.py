"""Quiet trainers on CUDA, with deterministic algorithms."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import footplate as fp

# JAX would take three quarters of the memory that torch needs too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture
def make_trainer(tmp_path: Path):
    """A function that makes quiet trainers on the first GPU, all in one run directory."""

    def make(**kwargs: Any) -> fp.Trainer:
        defaults: dict[str, Any] = {
            "accelerator": "cuda",
            "devices": 1,
            "deterministic": True,
            "default_root_dir": tmp_path / "run",
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": False,
            "seed": 1,
            "max_epochs": 2,
        }
        return fp.Trainer(**{**defaults, **kwargs})

    return make
