"""Log the learning rate, and the momentum if asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from footplate.callbacks.base import Callback
from footplate.errors import ConfigError

if TYPE_CHECKING:
    from footplate.module import Module
    from footplate.trainer import Trainer


class LearningRateMonitor(Callback):
    """Send the learning rate of every optimizer to the loggers, as `lr-AdamW`, `lr-SGD/pg1`, …

    Args:
        logging_interval: "step" (with the metrics of a step), "epoch", or None for both as schedulers step.
        log_momentum: the momentum (`betas[0]` for Adam) too.
        log_weight_decay: the weight decay too.
    """

    sees_weights = False

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ConfigError(
                f'LearningRateMonitor(logging_interval="{logging_interval}"): expected "step" or "epoch".'
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.logging_interval != "epoch" and trainer.logs_this_step:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self.logging_interval != "step":
            self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        values: dict[str, float] = {}
        named = [(config.scheduler.optimizer, config.name) for config in trainer.lr_scheduler_configs if config.name]
        for index, optimizer in enumerate(trainer.optimizers):
            kind = type(optimizer).__name__
            same = [other for other in trainer.optimizers if type(other) is type(optimizer)]
            name = f"lr-{kind}" if len(same) == 1 else f"lr-{kind}-{index}"
            name = next((given for driven, given in named if driven is optimizer), name)
            for group_index, group in enumerate(optimizer.param_groups):
                suffix = f"/pg{group_index + 1}" if len(optimizer.param_groups) > 1 else ""
                values[f"{name}{suffix}"] = float(group["lr"])
                if self.log_momentum:
                    momentum = group.get("momentum", group.get("betas", (0.0,))[0])
                    values[f"{name}{suffix}-momentum"] = float(momentum)
                if self.log_weight_decay:
                    values[f"{name}{suffix}-weight_decay"] = float(group.get("weight_decay", 0.0))
        for name, value in values.items():
            self.lrs.setdefault(name, []).append(value)
        trainer.log_now(values)
