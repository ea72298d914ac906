"""The contract of a callback: something that watches a run and now and then acts.

Override the hooks you need; the names, order and arguments are Lightning's. Every hook gets the trainer and the module
first. A callback with something to remember returns it from `state_dict` in plain values and tensors.

The hooks below leave both types open: annotate your own with `fp.Trainer` and `fp.Module`, or with `TrainerView`
(`trainer_view.py`), which lists what a callback may use of a trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from footplate.core.hooks import empty_hooks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


@empty_hooks
class Callback:
    """Base class: every hook does nothing.

    Class attributes:
        order: when it is called among callbacks. 0: in the order given, before the module's own hooks. 1: after them, since
            it acts on what they log. 2: last, since it saves what all of them did.
        sees_weights: whether it looks at the module's parameters, or changes them. Those that don't are spared a copy where
            the weights live on a device of their own; this counts for Footplate's own callbacks alone.
    """

    order: int = 0
    sees_weights: bool = True

    @property
    def state_key(self) -> str:
        """What a checkpoint files its state under."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """What it must remember."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The counterpart of `state_dict`."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before anything else of a stage: "fit", "validate", "test" or "predict"."""

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """After everything else of a stage."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """At the very beginning of `fit`."""

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """At the very end of `fit`."""

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Before the few validation batches that are tried before training."""

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        """After them."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Before the first training epoch."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """After the last training epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Before the first batch of an epoch."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """After the last batch of an epoch, validation included."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Before a training batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a training batch."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Before a validation run."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """After a validation run; `trainer.callback_metrics` holds its results."""

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """After the last validation batch."""

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a validation batch."""

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a validation batch."""

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Before a test run."""

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """After a test run."""

    def on_test_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Before the first test batch."""

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """After the last test batch."""

    def on_test_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a test batch."""

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a test batch."""

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Before a prediction run."""

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """After a prediction run."""

    def on_predict_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Before the first batch to predict."""

    def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """After the last predicted batch."""

    def on_predict_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a batch is predicted."""

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a batch is predicted."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Before the gradients are cleared."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Before the backward pass."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """After the backward pass."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Before the optimizer steps."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add plain values or tensors to a checkpoint."""

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Read what `on_save_checkpoint` added."""

    def weights_to_save(self, weights: dict[str, Any]) -> dict[str, Any]:
        """The weights that a weights-only checkpoint holds: those of the module, or others that this callback keeps."""
        return weights

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Training was stopped by an exception, KeyboardInterrupt included."""


def is_kind(callback: Any, kind: type) -> bool:
    """Return True if a callback is of a kind of ours, or of another library's class of the same name."""
    return isinstance(callback, kind) or any(base.__name__ == kind.__name__ for base in type(callback).__mro__)
