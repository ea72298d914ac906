"""Log learning rates, and optionally momentum and weight decay."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from footplate.callbacks.base import Callback
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView


class LearningRateMonitor(Callback):
    """Log the learning rate of every optimizer, as `lr-AdamW`, `lr-AdamW-1` (a second AdamW), `lr-SGD/pg1`, …

    The row of a step has the rate that the step used. The row of an epoch has the rate at the beginning of the epoch.

    Args:
        logging_interval: "step" (with the metrics of a step), "epoch", or None. None logs at each step for a scheduler by
            step, at each epoch for a scheduler by epoch, and at both for an optimizer without a scheduler.
        log_momentum: log the momentum (`betas[0]` for Adam), too.
        log_weight_decay: log the weight decay, too.

    Examples:
        >>> trainer = fp.Trainer(max_epochs=1, callbacks=[fp.LearningRateMonitor()])
        >>> trainer.fit(model, train)
        >>> "lr-SGD" in trainer.logged_metrics
        True
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
        # The values that the next step will use, if that step is reported.
        self._next: dict[str, float] | None = None
        # The values at the beginning of the epoch.
        self._epoch: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": dict(self._epoch)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epoch = dict(state_dict["epoch"])

    def on_train_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._epoch = {} if self.logging_interval == "step" else self._read(trainer, "epoch")

    def on_train_batch_start(self, trainer: TrainerView, pl_module: Module, batch: Any, batch_idx: int) -> None:
        # Inside a call of several steps, the end of the step before has read the values already.
        if batch_idx == trainer.progress.batch_idx:
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
        """Read the values of the next step if it is reported. Schedulers change the values after the step."""
        due = trainer.logs_next_step or not trainer.module.automatic_optimization
        self._next = self._read(trainer, "step") if due and self.logging_interval != "epoch" else None

    def _log(self, trainer: TrainerView, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.lrs.setdefault(name, []).append(value)
        trainer.log_now(values)

    def _read(self, trainer: TrainerView, interval: str) -> dict[str, float]:
        """Read the current values of the optimizers that are logged at this interval."""
        values: dict[str, float] = {}
        seen: Counter[str] = Counter()
        for optimizer in trainer.optimizers:
            configs = [config for config in trainer.lr_scheduler_configs if config.scheduler.optimizer is optimizer]
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
