"""The learning rate at each size of a study: the rule by which it grows with the batch, and its warm-up.

`batch_size` is the same on every process, so n processes make global batches n times as large. There are three rules for
the learning rate of n processes:

    linear   n times that of one process, the sum of n small steps (Goyal et al. 2017). It begins with a warm-up from the
             rate of one process, because the first steps would be too large otherwise.
    sqrt     √n times that of one process, which keeps the variance of the step (Krizhevsky 2014, Hoffer et al. 2017)
    none     the same

In a worker of a study the rate is *in force*. A `Trainer` gets it from a callback (`study_callbacks.py`). Code without a
trainer asks for it:

    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = footplate.scaling.learning_rate(0.1, epoch=step / steps_per_epoch)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from footplate.core.errors import ConfigError, did_you_mean

Rule = Literal["linear", "sqrt", "none"]

# The warm-up of the linear rule, in epochs. Goyal et al. use 5 of 90.
WARM_UP = 1.0


@dataclass(frozen=True)
class Rate:
    """The change of the learning rate of one process.

    Attributes:
        factor: the rate is multiplied by this factor.
        warmup: the epochs in which the factor grows linearly from 1 to `factor`.
        base: the rate of one process, in place of the training's own rate; None keeps the training's own.
    """

    factor: float = 1.0
    warmup: float = 0.0
    base: float | None = None

    def ramp(self, epoch: float) -> float:
        """The part of the full rate after `epoch` epochs, from 1/factor to 1."""
        if self.warmup <= 0.0 or epoch >= self.warmup:
            return 1.0
        return (1.0 + (self.factor - 1.0) * max(0.0, epoch) / self.warmup) / self.factor

    def at(self, own: float, epoch: float | None = None) -> float:
        """The rate for a training whose own rate for one process is `own`; without an epoch, the rate after the warm-up."""
        full = (own if self.base is None else self.base) * self.factor
        return full if epoch is None else full * self.ramp(epoch)


def factor(rule: Rule, np: int) -> float:
    """The factor of the learning rate with `np` processes.

    >>> factor("linear", 4), factor("sqrt", 4), factor("none", 4)
    (4.0, 2.0, 1.0)
    """
    return {"linear": float(np), "sqrt": math.sqrt(np), "none": 1.0}[rule]


def check_rule(rule: Any, lr: Any, warmup: Any) -> tuple[Rule, float | None, float]:
    """Check rule, base rate and warm-up; returns them. The default warm-up is 1 epoch for "linear", else 0.

    Raises:
        ConfigError: a value is invalid, or two contradict each other.
    """
    if rule not in get_args(Rule):
        raise ConfigError(f"lr_rule={rule!r}: {did_you_mean(str(rule), get_args(Rule))}")
    if lr is not None and not _is_number(lr, above=0.0):
        raise ConfigError(
            f"lr={lr!r}: expected the learning rate of one process, above 0, or None for the training's own rate."
        )
    if warmup is None:
        return rule, lr, WARM_UP if rule == "linear" else 0.0
    if not (_is_number(warmup, above=0.0) or warmup == 0):
        raise ConfigError(f"warmup={warmup!r}: expected a number of epochs, 0 or more.")
    if rule == "none" and warmup:
        raise ConfigError(
            f'warmup={warmup} with lr_rule="none": the rate doesn\'t grow, so there is nothing to warm up to. '
            "Leave warmup out."
        )
    return rule, lr, float(warmup)


def _is_number(value: Any, above: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and above < value < math.inf


_in_force: Rate | None = None
_asked = False


@contextlib.contextmanager
def in_force(rate: Rate) -> Iterator[None]:
    """Set the rate that `learning_rate` applies within the block."""
    global _in_force, _asked
    _in_force, _asked = rate, False
    try:
        yield
    finally:
        _in_force, _asked = None, False


def learning_rate(own: float, epoch: float | None = None) -> float:
    """Return the learning rate to use. Outside of a study this is `own`.

    Code that calls this function applies the rate itself: trainers that run afterwards don't change their rates. Without a
    call, the study sets the rates of trainers.

    Args:
        own: the training's own rate for one process.
        epoch: the number of epochs so far, such as 2.5, for the warm-up; None returns the rate after the warm-up.

    Examples:
        >>> from footplate.scaling import learning_rate
        >>> learning_rate(0.1, epoch=0.5)  # outside of a study, the rate itself
        0.1
    """
    global _asked
    if _in_force is None:
        return own
    _asked = True
    return _in_force.at(own, epoch)


def asked() -> bool:
    """Return True if the code has called `learning_rate`."""
    return _asked
