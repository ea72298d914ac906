"""The hooks that a module may override, under Lightning's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from footplate.core.hooks import empty_hooks

if TYPE_CHECKING:
    pass


@empty_hooks
class ModuleHooks:
    """The hooks of a module. Every hook does nothing until you override it, and one that isn't overridden is never called.

    Around everything: `configure_callbacks`, `setup(stage)`, `configure_model`, … `teardown(stage)`. A batch of
    training: `on_train_batch_start`, `training_step`, `on_before_zero_grad`, `on_before_backward`,
    `on_after_backward`, `on_before_optimizer_step`, `on_train_batch_end`.
    """

    def prepare_data(self) -> None:
        """Download or build what training needs, once per machine. Keep no state here."""

    def setup(self, stage: str) -> None:
        """Before anything else of a stage: "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """After everything else of a stage."""

    def configure_callbacks(self) -> Any:
        """Return callbacks that belong to this module, one or a list. They replace the trainer's of the same type."""
        return []

    def configure_model(self) -> None:
        """Build large layers here, just before training. It may be called twice."""

    def on_fit_start(self) -> None:
        """At the very beginning of `fit`."""

    def on_fit_end(self) -> None:
        """At the very end of `fit`."""

    def on_train_start(self) -> None:
        """Before the first training epoch, after the sanity check."""

    def on_train_end(self) -> None:
        """After the last training epoch."""

    def on_train_epoch_start(self) -> None:
        """Before the first batch of an epoch."""

    def on_train_epoch_end(self) -> None:
        """After the last batch of an epoch. `self.log` here logs for the epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Before a training batch. Return -1 to skip the rest of the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a training batch. `outputs` is the return of `training_step`, detached."""

    def on_validation_start(self) -> None:
        """Before a validation run."""

    def on_validation_end(self) -> None:
        """After a validation run."""

    def on_validation_epoch_start(self) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """After the last validation batch. `self.log` here logs for the epoch."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a validation batch."""

    def on_validation_model_eval(self) -> None:
        """Put the model into evaluation mode for validation."""
        self.eval()  # type: ignore[attr-defined]

    def on_validation_model_train(self) -> None:
        """After validation. The trainer has restored the mode of every submodule already."""

    def on_test_start(self) -> None:
        """Before a test run."""

    def on_test_end(self) -> None:
        """After a test run."""

    def on_test_epoch_start(self) -> None:
        """Before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """After the last test batch. `self.log` here logs for the epoch."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a test batch."""

    def on_test_model_eval(self) -> None:
        """Put the model into evaluation mode for testing."""
        self.eval()  # type: ignore[attr-defined]

    def on_test_model_train(self) -> None:
        """After testing. The trainer has restored the mode of every submodule already."""

    def on_predict_start(self) -> None:
        """Before a prediction run."""

    def on_predict_end(self) -> None:
        """After a prediction run."""

    def on_predict_epoch_start(self) -> None:
        """Before the first batch to predict."""

    def on_predict_epoch_end(self) -> None:
        """After the last predicted batch."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a batch is predicted."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a batch is predicted."""

    def on_predict_model_eval(self) -> None:
        """Put the model into evaluation mode for prediction."""
        self.eval()  # type: ignore[attr-defined]

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Before the gradients are cleared."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Before `loss.backward()`."""

    def on_after_backward(self) -> None:
        """After `loss.backward()`, before gradients are clipped."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Before `optimizer.step()`. Gradients are complete and unscaled, but not clipped."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add plain values or tensors of your own to a checkpoint."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read what `on_save_checkpoint` added, or correct an older checkpoint before it is loaded."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the host, and return it."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device. Override it for your own types of batches."""
        from footplate.hardware.transfer import to_device

        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device, for augmentation for example, and return it."""
        return batch
