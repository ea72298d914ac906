"""The monitored metric of a callback: reading and comparing it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from footplate.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from footplate.callbacks.trainer_view import TrainerView


def check_mode(mode: str, owner: str) -> str:
    """Return `mode` if it is "min" or "max".

    Raises:
        ConfigError: `mode` is neither.
    """
    if mode not in ("min", "max"):
        raise ConfigError(f'{owner}(mode="{mode}"): expected "min" or "max".')
    return mode


def better(score: float, than: float, mode: str) -> bool:
    """Return True if a score is strictly better than another."""
    return score < than if mode == "min" else score > than


def monitored(
    trainer: TrainerView, monitor: str, owner: str, strict: bool = True, values: Mapping[str, float] | None = None
) -> float | None:
    """Read the current value of a metric, or of an entry of `values`. All ranks get rank 0's, so that they agree.

    Raises:
        ConfigError: nothing of that name was logged, and `strict` is set.
    """
    value = trainer.group.from_first((trainer.latest_metrics() if values is None else values).get(monitor))
    if value is None:
        if not strict:
            return None
        raise ConfigError(
            f'{owner}(monitor="{monitor}"): nothing of that name has been logged. '
            f"{did_you_mean(monitor, trainer.callback_metrics)}"
        )
    return float(value)
