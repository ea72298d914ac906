"""Stop training when a metric stops improving, reaches a threshold, diverges, or becomes NaN or infinite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from footplate.callbacks.base import Callback
from footplate.callbacks.monitored_metric import better, check_mode, monitored

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView


class EarlyStopping(Callback):
    """Stop training when a metric stops improving, reaches a threshold, diverges, or becomes NaN or infinite.

    Args:
        monitor: the name of a logged metric.
        min_delta: the smallest change of the metric that counts as an improvement.
        patience: checks without improvement before training stops.
        verbose: print each improvement.
        mode: "min" or "max": which direction is better.
        strict: raise an error if the metric is missing; otherwise skip the check.
        check_finite: stop when the metric, or the training loss, becomes NaN or infinite.
        stopping_threshold: stop as soon as the metric is better than this.
        divergence_threshold: stop as soon as the metric is worse than this.
        check_on_train_epoch_end: check at the end of training epochs instead of validation. This is the default if
            validation runs once an epoch or never.
        log_rank_zero_only: accepted for compatibility, without effect.

    Examples:
        >>> stopping = fp.EarlyStopping("val_loss", patience=3, min_delta=0.01)
        >>> fp.Trainer(max_epochs=2, callbacks=[stopping]).fit(model, train, val)
    """

    order = 1
    sees_weights = False

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        self.monitor = monitor
        self.min_delta = abs(min_delta)
        self.patience = patience
        self.verbose = verbose
        self.mode = check_mode(mode, "EarlyStopping")
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self._reset()

    def _reset(self) -> None:
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score = math.inf if self.mode == "min" else -math.inf
        self.stopping_reason: str | None = None

    @property
    def state_key(self) -> str:
        return f"EarlyStopping[{self.monitor},{self.mode}]"

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "stopping_reason": self.stopping_reason,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.best_score = float(state_dict["best_score"])

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            self._reset()

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        """Stop at once if the run had stopped already and resumes with the same patience."""
        if self.check_on_train_epoch_end is None:
            self.check_on_train_epoch_end = trainer.validates_once_per_epoch or not trainer.has_validation
        if self.wait_count and self.wait_count >= self.patience:
            self._stop(trainer, f"{self.monitor} had not improved for {self.wait_count} checks before this run resumed")

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.check_finite and trainer.not_finite is not None and not trainer.should_stop:
            name, step = trainer.not_finite
            self._stop(trainer, f"{name} became NaN or infinite, first at step {step}")

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self.check_on_train_epoch_end:
            self._check(trainer)

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if not self.check_on_train_epoch_end and not trainer.sanity_checking and trainer.training_in_progress:
            self._check(trainer)

    def _check(self, trainer: TrainerView) -> None:
        if trainer.fast_dev_run:
            return
        score = monitored(trainer, self.monitor, "EarlyStopping", self.strict)
        if score is None:
            return
        reason = self._reason_to_stop(score, trainer)
        if reason is not None:
            self._stop(trainer, reason)

    def _reason_to_stop(self, score: float, trainer: TrainerView) -> str | None:
        if self.check_finite and not math.isfinite(score):
            first = f"; {trainer.not_finite[0]} first at step {trainer.not_finite[1]}" if trainer.not_finite else ""
            return f"{self.monitor} is {score} at step {trainer.global_step}{first}"
        if self.stopping_threshold is not None and better(score, self.stopping_threshold, self.mode):
            self.best_score = score
            return f"{self.monitor} = {score:.6g} reached the threshold of {self.stopping_threshold:g}"
        if self.divergence_threshold is not None and better(self.divergence_threshold, score, self.mode):
            return f"{self.monitor} = {score:.6g} is beyond the divergence threshold of {self.divergence_threshold:g}"

        delta = self.min_delta if self.mode == "max" else -self.min_delta
        if better(score, self.best_score + delta, self.mode):
            if self.verbose:
                trainer.print(f"{self.monitor} improved from {self.best_score:.6g} to {score:.6g}")
            self.best_score, self.wait_count = score, 0
            return None

        self.wait_count += 1
        if self.wait_count < self.patience:
            return None
        return f"{self.monitor} has not improved for {self.wait_count} checks (best: {self.best_score:.6g})"

    def _stop(self, trainer: TrainerView, reason: str) -> None:
        self.stopped_epoch = trainer.current_epoch
        self.stopping_reason = reason
        trainer.should_stop = True
        trainer.print(f"Early stopping in epoch {self.stopped_epoch}: {reason}.")
