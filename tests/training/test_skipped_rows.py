"""Unreadable rows are skipped on request, and the count is reported."""

from __future__ import annotations

import logging

import cv2
import numpy as np
import pyarrow as pa
import torch

import footplate as fp


class Mean(fp.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch["image"].float().flatten(1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_damaged_images_are_left_out_and_counted(make_trainer, caplog):
    png = cv2.imencode(".png", np.zeros((4, 4), np.uint8))[1].tobytes()
    table = fp.Table(pa.table({"image": [png] * 18 + [b"no image", png[:20]], "label": [0] * 20}))
    trainer = make_trainer(max_epochs=1)
    with caplog.at_level(logging.WARNING):
        trainer.fit(Mean(), fp.Loader(table, 5, on_error="skip"))
    assert "2 rows could not be read in epoch 0 and were left out" in caplog.text
    assert trainer.global_step == 4
