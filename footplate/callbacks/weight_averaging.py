"""Exponential moving average of the weights: training uses the weights; validation, checkpoints and the end the average.

    trained     w₁ → w₂ → w₃ → …               the optimizer's weights
    average     a₁ → a₂ → a₃ → …               aᵢ₊₁ = decay · aᵢ + (1 - decay) · wᵢ₊₁

While the average is in the module (during validation and after training), the trained weights are kept aside. The
`state_dict` of a checkpoint is always the average, so that loading it gives the better model. The trained weights are
saved, too, as `current_model_state`, and a resumed run continues with them. The names are those of Lightning's callback.

If the model is sharded over ranks, each rank averages its own shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from footplate.callbacks.base import Callback
from footplate.checkpoint.frozen_weights import FROZEN_WEIGHTS, TRAINED
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView

Pairs = tuple[list[Tensor], list[Tensor]]


class EMAWeightAveraging(Callback):
    """Keep an exponential moving average of the weights.

    Args:
        decay: the weight of the old average in an update; between 0 and 1.
        update_every_n_steps: update after every n optimizer steps.
        update_starting_at_step: the step (from 0) at which averaging starts. Until then, the average equals the trained
            weights.
        use_buffers: also average floating-point buffers, such as running statistics; otherwise the trained ones are used.

    Raises:
        ConfigError: a number is out of range.

    Examples:
        >>> trainer = fp.Trainer(max_epochs=2, callbacks=[fp.EMAWeightAveraging(decay=0.99, update_starting_at_step=2)])
        >>> trainer.fit(model, train)
    """

    def __init__(
        self,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int = 0,
        use_buffers: bool = True,
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"EMAWeightAveraging(decay={decay}): expected 0 or more and less than 1, such as 0.999.")
        if update_every_n_steps < 1:
            raise ConfigError(f"EMAWeightAveraging(update_every_n_steps={update_every_n_steps}): expected 1 or more.")
        if update_starting_at_step < 0:
            raise ConfigError(
                f"EMAWeightAveraging(update_starting_at_step={update_starting_at_step}): expected 0 or more."
            )
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.use_buffers = use_buffers
        self._reset()

    def _reset(self) -> None:
        # The average; the trained weights while the average is in the module.
        self._aside: dict[str, Tensor] = {}
        # True while the average is in the module.
        self._in_use = False
        # True if the tensors are shards of this rank (DTensor).
        self._sharded = False
        # The step of the last update check.
        self._steps = 0
        # Averaged tensors: aside, and in the module.
        self._moving: Pairs = ([], [])
        # Copied tensors, such as counts: aside, and in the module.
        self._following: Pairs = ([], [])
        # Where the module keeps each buffer, because a step may replace the tensor.
        self._buffers: list[tuple[dict[str, Tensor | None], str, list[Tensor], int]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = state_dict["steps"]

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            self._reset()

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._sharded = trainer.parallel.sharded
        trained = pl_module.state_dict()
        if not self._aside:
            self._aside = _copied(trained)

        # Use the parameters themselves, because their data may be replaced.
        parameters = dict(pl_module.named_parameters(remove_duplicate=False))
        live = {**trained, **parameters}
        modules = dict(pl_module.named_modules())

        for name, value in trained.items():
            moves = value.is_floating_point() and (self.use_buffers or name in parameters)
            aside, current = self._moving if moves else self._following
            layer, _, own_name = name.rpartition(".")
            if layer in modules and own_name in modules[layer]._buffers:
                self._buffers.append((modules[layer]._buffers, own_name, current, len(current)))
            aside.append(self._aside[name])
            current.append(live[name])

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # Inside an accumulation window, there is no new optimizer step.
        if step == self._steps:
            return
        self._steps = step

        index, (average, trained) = step - 1, self._moving
        if index > self.update_starting_at_step and index % self.update_every_n_steps:
            return

        for buffers, name, current, position in self._buffers:
            current[position] = buffers[name]  # pyright: ignore[reportArgumentType, reportCallIssue]
        if self._sharded:
            average, trained = _local(average), _local(trained)
        if average and index <= self.update_starting_at_step:
            torch._foreach_copy_(average, trained)  # pyright: ignore[reportPrivateImportUsage]
        elif average:
            torch._foreach_lerp_(average, trained, 1.0 - self.decay)  # pyright: ignore[reportPrivateImportUsage]
        for aside, value in zip(*self._following, strict=True):
            aside.copy_(value)

    def on_validation_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        if trainer.training_in_progress:
            self._exchange(pl_module)

    def on_validation_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if trainer.training_in_progress:
            self._exchange(pl_module)

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._exchange(pl_module)

    def on_save_checkpoint(self, trainer: TrainerView, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        if not self._aside:
            return
        if self._in_use:
            checkpoint[TRAINED] = self._aside
        else:
            checkpoint[TRAINED], checkpoint["state_dict"] = checkpoint["state_dict"], self._aside

    def weights_to_save(self, weights: dict[str, Any]) -> dict[str, Any]:
        return weights if self._in_use or not self._aside else self._aside

    def on_load_checkpoint(self, trainer: TrainerView, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        if TRAINED in checkpoint:
            self._aside = _copied(pl_module.state_dict())
            trained = trainer.parallel.weight_parts({"state_dict": checkpoint[TRAINED]}, pl_module)
            pl_module.load_state_dict(trained["state_dict"], strict=not checkpoint.get(FROZEN_WEIGHTS))

    @torch.no_grad()
    def _exchange(self, module: Module) -> None:
        """Exchange the module's weights with those aside."""
        current = module.state_dict()
        copies = _copied(current)
        for name, value in current.items():
            value.copy_(self._aside[name])
            self._aside[name].copy_(copies[name])
        self._in_use = not self._in_use


def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def _local(tensors: list[Tensor]) -> list[Tensor]:
    """Return the shards of this rank, in the same memory. torch's functions for lists take no DTensors."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]  # type: ignore[attr-defined]
