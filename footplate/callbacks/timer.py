"""Stop training after a duration (by the clock of rank 0), and measure the time of each stage."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from footplate.callbacks.base import Callback
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView

Duration = str | timedelta | dict[str, int]


class Timer(Callback):
    """Stop training after `duration`, summed over all attempts.

    Args:
        duration: "DD:HH:MM:SS", a timedelta, or a dict of its arguments; None only measures the time.
        interval: check after each "step" or "epoch".
        verbose: print a line when the time is up.

    Examples:
        >>> trainer = fp.Trainer(callbacks=[fp.Timer("00:08:00:00")])  # eight hours, over all attempts
    """

    sees_weights = False

    def __init__(
        self, duration: Duration | None = None, interval: Literal["step", "epoch"] = "step", verbose: bool = True
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ConfigError(f'Timer(interval="{interval}"): expected "step" or "epoch".')
        self.interval = interval
        self.verbose = verbose
        self._limit_s = None if duration is None else parse_duration(duration).total_seconds()
        self._began: dict[str, float] = {}
        self._elapsed_s: dict[str, float] = {}

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds spent in "train", "validate", "test" or "predict", including earlier attempts."""
        running = time.monotonic() - self._began[stage] if stage in self._began else 0.0
        return self._elapsed_s.get(stage, 0.0) + running

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the remaining seconds; None without a limit."""
        return None if self._limit_s is None else self._limit_s - self.time_elapsed(stage)

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed_s": {stage: self.time_elapsed(stage) for stage in {*self._elapsed_s, *self._began}}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._elapsed_s = dict(state_dict["elapsed_s"])

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._began["train"] = time.monotonic()
        self._check(trainer)

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._stop("train")

    def on_validation_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._began["validate"] = time.monotonic()

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._stop("validate")

    def on_test_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._began["test"] = time.monotonic()

    def on_test_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._stop("test")

    def on_predict_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._began["predict"] = time.monotonic()

    def on_predict_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._stop("predict")

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.interval == "step":
            self._check(trainer)

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._check(trainer)

    def _stop(self, stage: str) -> None:
        self._elapsed_s[stage] = self.time_elapsed(stage)
        self._began.pop(stage, None)

    def _check(self, trainer: TrainerView) -> None:
        remaining = self.time_remaining() if trainer.world.rank == 0 else None
        if remaining is not None and remaining <= 0 and not trainer.should_stop:
            trainer.should_stop = True
            if self.verbose:
                trainer.print(f"Time is up: training has taken {timedelta(seconds=int(self.time_elapsed()))}.")


def parse_duration(duration: Duration, name: str = "max_time") -> timedelta:
    """Parse a duration in any of the forms that `max_time` accepts.

    Args:
        duration: "DD:HH:MM:SS", a timedelta, or a dict of its arguments.
        name: the name of the argument, for error texts.

    Raises:
        ConfigError: the duration has another form, or is not positive.
    """
    expected = 'expected "DD:HH:MM:SS", a timedelta, or a dict such as {"hours": 2}.'
    try:
        if isinstance(duration, timedelta):
            parsed = duration
        elif isinstance(duration, dict):
            parsed = timedelta(**duration)
        else:
            days, hours, minutes, seconds = (int(part) for part in str(duration).strip().split(":"))
            parsed = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    except (ValueError, TypeError):
        raise ConfigError(f"{name}={duration!r}: {expected}") from None
    if parsed <= timedelta(0):
        raise ConfigError(f"{name}={duration!r}: must be positive; {expected}")
    return parsed
