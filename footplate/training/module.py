"""What a user writes: a `Module` says what one step is, a `DataModule` says where batches come from.

    class Classifier(fp.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch["image"]), batch["label"])
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

The shape is that of `lightning.pytorch.LightningModule`, name for name, so that what people know and have written
carries over. Every hook below does nothing until it is overridden, and one that isn't overridden is never called.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from footplate.core.errors import ConfigError
from footplate.core.hooks import empty_hooks
from footplate.core.hparams import HyperParameters

if TYPE_CHECKING:
    from footplate.tracking.base import Logger
    from footplate.training.trainer import Trainer


@empty_hooks
class ModuleHooks:
    """The hooks that a module may override, in the order in which they come.

    Around everything: `configure_callbacks`, `setup(stage)`, `configure_model`, … `teardown(stage)`. A batch of
    training: `on_train_batch_start`, `training_step`, `on_before_zero_grad`, `on_before_backward`,
    `on_after_backward`, `on_before_optimizer_step`, `on_train_batch_end`.
    """

    def prepare_data(self) -> None:
        """Download or build what training needs, once per machine; keep no state here."""

    def setup(self, stage: str) -> None:
        """Before anything else of a stage: "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """After everything else of a stage."""

    def configure_callbacks(self) -> Any:
        """Callbacks that belong to this module: one or a list; they replace the trainer's of the same type."""
        return []

    def configure_model(self) -> None:
        """Build large layers here, just before training; must be safe to call twice."""

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
        """After the last batch of an epoch; `self.log` here is logged for the epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Before a training batch; return -1 to skip the rest of the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a training batch; `outputs` is what `training_step` returned, detached."""

    def on_validation_start(self) -> None:
        """Before a validation run."""

    def on_validation_end(self) -> None:
        """After a validation run."""

    def on_validation_epoch_start(self) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """After the last validation batch; `self.log` here is logged for the epoch."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a validation batch."""

    def on_validation_model_eval(self) -> None:
        """Put the model into evaluation mode for validation."""
        self.eval()  # type: ignore[attr-defined]

    def on_validation_model_train(self) -> None:
        """Called after validation; the trainer has restored every submodule's earlier mode."""

    def on_test_start(self) -> None:
        """Before a test run."""

    def on_test_end(self) -> None:
        """After a test run."""

    def on_test_epoch_start(self) -> None:
        """Before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """After the last test batch; `self.log` here is logged for the epoch."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a test batch."""

    def on_test_model_eval(self) -> None:
        """Put the model into evaluation mode for testing."""
        self.eval()  # type: ignore[attr-defined]

    def on_test_model_train(self) -> None:
        """Called after testing; the trainer has restored every submodule's earlier mode."""

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
        """Before `optimizer.step()`; gradients are complete and unscaled, not yet clipped."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add plain values or tensors of your own to a checkpoint."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read what `on_save_checkpoint` added, or mend an older checkpoint before it is loaded."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the host; returns it."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device; override for batch types of your own."""
        from footplate.hardware.transfer import to_device

        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device (augmentation, say); returns it."""
        return batch


class TrainerBound:
    """What a module asks of the trainer that runs it: logging, optimizers, its place in the run.

    Nothing here has state beyond `_trainer`, so the same methods serve a module of another library; see `prepare.py`.
    """

    _trainer: Trainer | None = None

    @property
    def trainer(self) -> Trainer:
        """The trainer that runs this module."""
        if self._trainer is None:
            raise ConfigError(f"{type(self).__name__} is not attached to a Trainer: call trainer.fit(module) first.")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        object.__setattr__(self, "_trainer", trainer)

    def __getstate__(self) -> dict[str, Any]:
        """A copy belongs to no trainer."""
        return {**vars(self), "_trainer": None}

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0."""
        return self._trainer.current_epoch if self._trainer else 0

    @property
    def global_step(self) -> int:
        """Optimizer steps taken so far."""
        return self._trainer.global_step if self._trainer else 0

    @property
    def global_rank(self) -> int:
        """The rank of this process among all."""
        return self._trainer.world.rank if self._trainer else 0

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return self._trainer.world.local_rank if self._trainer else 0

    @property
    def logger(self) -> Logger | None:
        """The first logger of the trainer."""
        return self._trainer.logger if self._trainer else None

    @property
    def loggers(self) -> list[Logger]:
        """All loggers of the trainer."""
        return self._trainer.loggers if self._trainer else []

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Tensor], Tensor] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: float | Tensor | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Record a metric under a name. Costs no device synchronisation: values are read when they are next reported.

        Args:
            name: the key that callbacks and loggers see. Logged both by step and by epoch, it becomes `name_step` and
                `name_epoch` as well.
            value: a number, a one-element tensor, a torchmetrics `Metric`, or a dict of these.
            prog_bar: show it in the progress display.
            logger: send it to the loggers (default: yes).
            on_step: report the latest value every `log_every_n_steps`. Default: in `training_step` and batch hooks of
                training.
            on_epoch: reduce the values of an epoch with `reduce_fx`. Default: in evaluation and epoch hooks.
            reduce_fx: "mean" (weighted by batch size), "sum", "min", "max", or a function of the stacked values.
            enable_graph: accepted for Lightning's sake; values are always detached.
            sync_dist: reduce over all ranks too.
            sync_dist_group: the process group to reduce over; all ranks by default.
            add_dataloader_idx: with several evaluation loaders, append `/dataloader_idx_N` to the name.
            batch_size: the weight of this value in the epoch's mean. Default: the first dimension of the batch. For a mean
                over tokens, give the number of tokens. A tensor on the device costs no synchronisation.
            metric_attribute: accepted for Lightning's sake; metrics are found by themselves.
            rank_zero_only: the call is made on rank 0 alone, so it is never reduced over ranks.

        Raises:
            ConfigError: the value is not a number, or logging is not possible here.
        """
        trainer = self._trainer
        if trainer is None:
            _warn_unattached(type(self).__name__)
            return
        trainer.metrics.log(
            name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist and not rank_zero_only,
            add_dataloader_idx, batch_size,
        )  # fmt: skip

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """`log` for every item; takes the same arguments after it. A torchmetrics `MetricCollection` is a mapping too."""
        # The members of a MetricCollection share their states; by default `items` would copy these at each call.
        shared = {"copy_state": False} if getattr(dictionary, "_enable_compute_groups", False) else {}
        for name, value in dictionary.items(**shared):
            self.log(name, value, *args, **kwargs)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of them, for manual optimisation; each `.step()` counts as a global step."""
        found = self.trainer.step_optimizers if use_pl_optimizer else self.trainer.optimizers
        return found[0] if len(found) == 1 else found

    def lr_schedulers(self) -> Any:
        """The learning-rate scheduler, the list of them, or None."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        if not found:
            return None
        return found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """`loss.backward()` with the precision's scaling, for manual optimisation."""
        if self.automatic_optimization:  # type: ignore[attr-defined]
            raise ConfigError("manual_backward() needs manual optimisation: set self.automatic_optimization = False.")
        self.trainer.step.backward(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of an optimizer's parameters, by norm (default) or value; without a value, do nothing."""
        if gradient_clip_val is None:
            gradient_clip_val = self.trainer.gradient_clip_val
        algorithm = gradient_clip_algorithm or self.trainer.gradient_clip_algorithm
        self.trainer.step.clip_gradients(optimizer, gradient_clip_val, algorithm)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters require gradients, until `untoggle_optimizer` or another is toggled."""
        self.untoggle_optimizer(optimizer)
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        groups = [group for other in self.trainer.optimizers for group in other.param_groups]
        others = {p: p.requires_grad for group in groups for p in group["params"] if p not in mine}
        for parameter in others:
            parameter.requires_grad = False
        self.__dict__["_toggled"] = others

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo `toggle_optimizer`."""
        for parameter, required in self.__dict__.pop("_toggled", {}).items():
            parameter.requires_grad = required

    @contextlib.contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """`toggle_optimizer` for the length of a `with` block."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """`data` of every rank, stacked in a new first dimension."""
        return self.trainer.all_gather(data, group, sync_grads)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, without breaking the progress display."""
        if self._trainer is None:
            print(*args, **kwargs)
        else:
            self._trainer.print(*args, **kwargs)


@empty_hooks
class Module(HyperParameters, ModuleHooks, TrainerBound, nn.Module):
    """A `torch.nn.Module` that knows its training step, its optimizers and its evaluation steps.

    Attributes:
        automatic_optimization: True (default): the trainer calls backward, clips, steps and clears. False: your
            `training_step` does, with `self.optimizers()` and `self.manual_backward(loss)`.
        example_input_array: a tensor, tuple or dict that `forward` takes; used for export and model signatures.
        strict_loading: whether a checkpoint's `state_dict` must match this module's exactly.
    """

    automatic_optimization: bool = True
    example_input_array: Any = None
    strict_loading: bool = True

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or buffer; the CPU when there is none."""
        for tensor in (*self.parameters(), *self.buffers()):
            return tensor.device
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first floating-point parameter; torch's default when there is none."""
        for tensor in self.parameters():
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.get_default_dtype()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One step: `(batch, batch_idx)` → the loss, a dict with "loss", or None to skip the batch."""
        raise NotImplementedError(f"{type(self).__name__} has no training_step")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """`(batch, batch_idx[, dataloader_idx])`: log what you want to know; the return value goes to hooks."""
        raise NotImplementedError(f"{type(self).__name__} has no validation_step")

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like `validation_step`, for `trainer.test`."""
        raise NotImplementedError(f"{type(self).__name__} has no test_step")

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """`(batch, batch_idx[, dataloader_idx])` → predictions; `self(batch)` unless overridden."""
        return self(args[0])

    def configure_optimizers(self) -> Any:
        """The optimizer(s) and learning-rate scheduler(s); `footplate.step.optimizers` lists every form."""
        raise NotImplementedError(f"{type(self).__name__} has no configure_optimizers")

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """How a loss is turned into gradients."""
        loss.backward(*args, **kwargs)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """How gradients are clipped; call `self.clip_gradients` with values of your own."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """How an optimizer steps; `optimizer_closure` computes the loss and gradients and must be run by the step."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """How gradients are cleared."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """How a scheduler steps; `metric` is the monitored value for those that want one, else None."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def freeze(self) -> Self:
        """Stop every gradient and go into evaluation mode."""
        for parameter in self.parameters():
            parameter.requires_grad = False
        return self.eval()

    def unfreeze(self) -> Self:
        """Let every parameter learn and go into training mode."""
        for parameter in self.parameters():
            parameter.requires_grad = True
        return self.train()

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, map_location: Any = "cpu", strict: bool | None = None, **kwargs: Any
    ) -> Self:
        """Build this module from a checkpoint's hyper-parameters and load its weights. No code of the file is run.

        Args:
            checkpoint_path: a Footplate checkpoint, or a Lightning `.ckpt` file.
            map_location: where the weights go.
            strict: whether the names must match exactly; the module's `strict_loading` by default.
            **kwargs: arguments of `__init__`, over the checkpoint's; needed for those that it could not keep.

        Raises:
            CheckpointError: missing, incomplete, of another model, or an argument is missing.
        """
        from footplate.checkpoint import load_module

        return load_module(cls, checkpoint_path, map_location, strict, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_trainer"] = None
        return state


_warned: set[str] = set()


def _warn_unattached(name: str) -> None:
    if name not in _warned:
        _warned.add(name)
        warnings.warn(f"{name}.log() has no effect: the module is not attached to a Trainer.", stacklevel=3)
