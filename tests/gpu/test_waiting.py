"""The host doesn't wait for the GPU between two reports, whatever the trainer does besides training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.small import Classifier, loader

import footplate as fp

EVERY, STEPS = 20, 120


class Strict(fp.Callback):
    """Makes CUDA raise when the host waits for it, in all steps but the first and last ones and those that report."""

    def __init__(self, first: int = 1) -> None:
        self.first = first

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1
        reports = step % EVERY == 0 or batch_idx >= STEPS * 2 - 2 or step <= self.first
        torch.cuda.set_sync_debug_mode("default" if reports else "error")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        torch.cuda.set_sync_debug_mode("default")


class Logs(Classifier):
    """Logs more, as modules do."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"twice": 2 * loss, "bar": loss.detach()}, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches() -> list[Any]:
    return [(torch.randn(10, 8).pin_memory(), torch.randint(3, (10,)).pin_memory()) for _ in range(STEPS * 2)]


SETTINGS: dict[str, dict[str, Any]] = {
    "plainly": {},
    "clipping": {"gradient_clip_val": 0.5},
    "bfloat16": {"precision": "bf16-mixed"},
    "graphs": {"compile": "cudagraphs", "gradient_clip_val": 0.5},
    "everything": {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "precision": "bf16-mixed",
        "enable_progress_bar": True,
        "logger": True,
        "enable_checkpointing": True,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_no_step_between_two_reports_waits_for_the_gpu(name, make_trainer):
    settings = {"enable_checkpointing": False, **SETTINGS[name]}
    # A graph is captured after three steps.
    callbacks: list[fp.Callback] = [Strict(first=4 if name == "graphs" else 1)]
    if name == "everything":
        callbacks += [
            fp.EMAWeightAveraging(),
            fp.LearningRateMonitor("step"),
            fp.EarlyStopping("train_loss", patience=9),
        ]
    trainer = make_trainer(max_epochs=1, log_every_n_steps=EVERY, callbacks=callbacks, deterministic=False, **settings)
    trainer.fit(Logs(), batches())
    assert trainer.global_step == STEPS * 2 // settings.get("accumulate_grad_batches", 1)


def test_a_loader_whose_batches_are_copied_ahead_waits_only_in_its_own_thread(make_trainer):
    """Its copies go from pageable memory through pinned memory, on a stream of their own."""
    trainer = make_trainer(max_epochs=1, log_every_n_steps=EVERY, callbacks=[Strict()], enable_checkpointing=False)
    trainer.fit(Logs(), loader(STEPS * 20, num_workers=2, pin_memory=True))
    assert trainer.global_step == STEPS * 2
