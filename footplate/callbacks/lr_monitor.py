"""Log the learning rate, and the momentum if asked."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from footplate.callbacks.base import Callback
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView


class LearningRateMonitor(Callback):
    """Send the learning rate of every optimizer to the loggers, as `lr-AdamW`, `lr-AdamW-1` (a second one), `lr-SGD/pg1`, …

    A step's row has the rate that the step used, an epoch's row the rate that the epoch began with.

    Args:
        logging_interval: "step" (with the metrics of a step), "epoch", or None: with each step where a scheduler goes by
            steps, with each epoch where one goes by epochs, with both where there is none.
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
        self._next: dict[str, float] | None = None  # what the next step will use, if it is reported
        self._epoch: dict[str, float] = {}  # what the epoch began with

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": dict(self._epoch)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epoch = dict(state_dict["epoch"])

    def on_train_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._epoch = {} if self.logging_interval == "step" else self._read(trainer, "epoch")

    def on_train_batch_start(self, trainer: TrainerView, pl_module: Module, batch: Any, batch_idx: int) -> None:
        if batch_idx == trainer.progress.batch_idx:  # inside a call of several steps, the end of the one before is read
            self._read_ahead(trainer)

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.logs_this_step and self._next:
            self._log(trainer, self._next)
        self._read_ahead(trainer)

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._log(trainer, self._epoch)

    def _read_ahead(self, trainer: TrainerView) -> None:
        """Before a step that is reported, read the values that it will use: schedulers change them after it."""
        due = trainer.logs_next_step or not trainer.module.automatic_optimization
        self._next = self._read(trainer, "step") if due and self.logging_interval != "epoch" else None

    def _log(self, trainer: TrainerView, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.lrs.setdefault(name, []).append(value)
        trainer.log_now(values)

    def _read(self, trainer: TrainerView, interval: str) -> dict[str, float]:
        """The present values of the optimizers that are logged by `interval`."""
        values: dict[str, float] = {}
        seen: Counter[str] = Counter()
        for optimizer in trainer.optimizers:
            configs = [one for one in trainer.lr_scheduler_configs if one.scheduler.optimizer is optimizer]
            kind = type(optimizer).__name__
            name = f"lr-{kind}-{seen[kind]}" if seen[kind] else f"lr-{kind}"
            name = next((config.name for config in configs if config.name), name)
            seen[kind] += 1
            if self.logging_interval is None and configs and all(config.interval != interval for config in configs):
                continue
            for group_index, group in enumerate(optimizer.param_groups):
                suffix = f"/pg{group_index + 1}" if len(optimizer.param_groups) > 1 else ""
                suffix = f"/{group['name']}" if "name" in group else suffix
                values[f"{name}{suffix}"] = float(group["lr"])
                if self.log_momentum:
                    momentum = group.get("momentum", group.get("betas", (0.0,))[0])
                    values[f"{name}{suffix}-momentum"] = float(momentum)
                if self.log_weight_decay:
                    values[f"{name}{suffix}-weight_decay"] = float(group.get("weight_decay", 0.0))
        return values
