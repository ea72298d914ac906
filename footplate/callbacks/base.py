"""The contract of a callback: an object whose hooks the trainer calls during a run.

Override the hooks that you need. Their names, order and arguments are Lightning's. Every hook gets the trainer and the
module first. A callback with state returns it from `state_dict`, as plain values and tensors.

The hooks below leave both types open. Annotate yours with `fp.Trainer` and `fp.Module`, or with `TrainerView`
(`trainer_view.py`), which lists the attributes of a trainer that a callback may use.
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

    Attributes:
        order: its position among the callbacks. 0: in the order of the list, before the module's own hooks. 1: after these
            hooks, to act on the metrics that they log. 2: last, to save what all hooks did.
        sees_weights: True if the callback reads or changes the module's parameters. If False, no copy is made for it where
            the weights are on a device of their own. This applies only to Footplate's own callbacks.
        saves_nothing: True to leave out every `ModelCheckpoint` of a call, as a replay does.

    Examples:
        >>> class Count(fp.Callback):
        ...     batches = 0
        ...
        ...     def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        ...         self.batches += 1
        >>> count = Count()
        >>> fp.Trainer(max_steps=3, callbacks=[count]).fit(model, train)
        >>> count.batches
        3
    """

    order: int = 0
    sees_weights: bool = True
    saves_nothing: bool = False

    @property
    def state_key(self) -> str:
        """The key of its state in a checkpoint."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called before anything else of a stage: "fit", "validate", "test" or "predict"."""

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called after everything else of a stage."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Called at the very beginning of `fit`."""

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Called at the very end of `fit`."""

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before the sanity check: a few validation batches that run before training."""

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        """Called after the sanity check."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before the first training epoch."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Called after the last training epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before the first batch of an epoch."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Called after the last batch of an epoch, validation included."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Called before a training batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a training batch."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before a validation run."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Called after a validation run; `trainer.callback_metrics` holds its results."""

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a validation batch."""

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before a test run."""

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Called after a test run."""

    def on_test_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a test batch."""

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a test batch."""

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before a prediction run."""

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """Called after a prediction run."""

    def on_predict_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before the first batch to predict."""

    def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Called after the last predicted batch."""

    def on_predict_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a batch is predicted."""

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a batch is predicted."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Called before the gradients are cleared."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Called before the backward pass."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Called after the backward pass."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Called before the optimizer steps."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add plain values or tensors to a checkpoint."""

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Read what `on_save_checkpoint` added."""

    def weights_to_save(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the weights for a weights-only checkpoint: the module's, or those that this callback keeps."""
        return weights

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Called after an exception, including KeyboardInterrupt, stopped training."""


def is_kind(callback: Any, kind: type) -> bool:
    """Return True if a callback is an instance of a Footplate class, or of another library's class of the same name."""
    return isinstance(callback, kind) or any(base.__name__ == kind.__name__ for base in type(callback).__mro__)
