"""The module: what one training step is, and with which optimizers.

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

The names are those of `lightning.pytorch.LightningModule`, so knowledge and code carry over.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from footplate.core.hooks import empty_hooks
from footplate.core.hparams import HyperParameters
from footplate.training.module_hooks import ModuleHooks
from footplate.training.trainer_access import TrainerAccess

if TYPE_CHECKING:
    pass


@empty_hooks
class Module(HyperParameters, ModuleHooks, TrainerAccess, nn.Module):
    """A `torch.nn.Module` with its training step, its optimizers and its evaluation steps.

    Attributes:
        automatic_optimization: True (default): the trainer calls backward, clips, steps and clears. False: your
            `training_step` does, with `self.optimizers()` and `self.manual_backward(loss)`.
        example_input_array: a tensor, tuple or dict that `forward` takes, for export and model signatures.
        strict_loading: a checkpoint's `state_dict` must match this module's exactly.

    Examples:
        >>> class Regression(fp.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(4, 1)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         features, target = batch
        ...         loss = torch.nn.functional.mse_loss(self.layer(features), target)
        ...         self.log("train_loss", loss, prog_bar=True)
        ...         return loss
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
    """

    automatic_optimization: bool = True
    example_input_array: Any = None
    strict_loading: bool = True

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or buffer. The CPU if there is none."""
        for tensor in (*self.parameters(), *self.buffers()):
            return tensor.device
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first floating-point parameter. Torch's default if there is none."""
        for tensor in self.parameters():
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.get_default_dtype()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One step: `(batch, batch_idx)` → the loss, a dict with "loss", or None to skip the batch."""
        raise NotImplementedError(f"{type(self).__name__} has no training_step")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """`(batch, batch_idx[, dataloader_idx])`: log your metrics. Hooks receive the return value."""
        raise NotImplementedError(f"{type(self).__name__} has no validation_step")

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like `validation_step`, for `trainer.test`."""
        raise NotImplementedError(f"{type(self).__name__} has no test_step")

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """`(batch, batch_idx[, dataloader_idx])` → predictions. By default `self(batch)`."""
        return self(args[0])

    def configure_optimizers(self) -> Any:
        """Return the optimizers and learning-rate schedulers. `footplate.step.optimizers` lists every form."""
        raise NotImplementedError(f"{type(self).__name__} has no configure_optimizers")

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss."""
        loss.backward(*args, **kwargs)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip gradients. Call `self.clip_gradients` with your own values."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Step an optimizer. `optimizer_closure` computes the loss and gradients, and the step must run it."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear gradients."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a scheduler. `metric` is the monitored value of a scheduler that needs one, else None."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def freeze(self) -> Self:
        """Stop all gradients and switch to evaluation mode."""
        for parameter in self.parameters():
            parameter.requires_grad = False
        return self.eval()

    def unfreeze(self) -> Self:
        """Train every parameter and switch to training mode."""
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
            map_location: the device of the weights.
            strict: the names must match exactly. By default the module's `strict_loading`.
            **kwargs: arguments of `__init__`. They override the checkpoint's, and replace those that it could not keep.

        Raises:
            CheckpointError: missing, incomplete, of another model, or an argument is missing.
        """
        from footplate.checkpoint import load_module

        return load_module(cls, checkpoint_path, map_location, strict, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_trainer"] = None
        return state
