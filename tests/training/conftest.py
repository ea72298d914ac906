"""A function that fits a small model, and the messages that Footplate logs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from models.small import Classifier, loader

from training.fits import Watch


@pytest.fixture
def fit(make_trainer):
    """Fit a model on 12 batches of 10, validate on 4. Return the trainer and the record."""

    def run(model: Any = None, train: Any = None, val: Any = "4 batches", ckpt_path=None, callbacks=(), **kwargs):
        watch = Watch()
        trainer = make_trainer(callbacks=[watch, *callbacks], **kwargs)
        torch.manual_seed(0)
        model = Classifier() if model is None else model() if isinstance(model, type) else model
        val_data = loader(40, shuffle=False) if isinstance(val, str) else val
        trainer.fit(model, loader() if train is None else train, val_data, ckpt_path=ckpt_path)
        return trainer, watch

    return run


@pytest.fixture
def _warnings_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="footplate")
