"""Sums of losses with their weight by `accelerator="xla"`: the gradient of the whole batch, regardless of the split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.test_loss_sum import Tokens, fitted, same, whole

from footplate.step.xla.capture.refusals import CaptureError


@pytest.mark.parametrize(
    ("batch_size", "window", "devices", "strategy"),
    [(12, 1, 1, "auto"), (4, 3, 1, "auto"), (5, 3, 4, "auto"), (5, 3, 2, "fsdp")],
)
def test_any_cut_gives_the_gradient_of_the_whole(
    tmp_path: Path, batch_size: int, window: int, devices: int, strategy: str
) -> None:
    model = fitted(
        tmp_path, Tokens(), batch_size,
        accelerator="xla", devices=devices, strategy=strategy, accumulate_grad_batches=window,
    )  # fmt: skip

    same(model, whole(), 1e-7)


def test_a_run_that_is_cut_inside_a_window_continues_it_with_torch(tmp_path: Path) -> None:
    class Stops(Tokens):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.trainer.save_checkpoint(tmp_path / "cut.ckpt")

    fitted(tmp_path / "first", Stops(), 3, accelerator="xla", accumulate_grad_batches=4, enable_checkpointing=True)

    ckpt_path = str(tmp_path / "cut.ckpt")
    for accelerator in ("cpu", "xla"):
        model = fitted(
            tmp_path / accelerator, Tokens(), 3, ckpt_path=ckpt_path, accelerator=accelerator, accumulate_grad_batches=4
        )
        same(model, whole(), 1e-7)


def test_hooks_see_the_mean_of_the_batch(tmp_path: Path) -> None:
    class Noted(Tokens):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(outputs["loss"]))

    losses = [
        fitted(tmp_path / name, Noted(), 4, accelerator=name, accumulate_grad_batches=3).losses
        for name in ("cpu", "xla")
    ]

    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-6, atol=0)


def test_a_count_on_the_device_as_batch_size_is_refused_with_another_way(tmp_path: Path) -> None:
    class Logs(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            self.log("loss", output["loss_sum"], batch_size=output["weight"])
            return output

    with pytest.raises(CaptureError, match="Log the sum and the count"):
        fitted(tmp_path, Logs(), 4, accelerator="xla")
