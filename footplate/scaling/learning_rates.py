"""The learning rate at each size of a study: by which rule it grows with the batch, and how it gets there.

With `batch_size` the same on every process, n processes make global batches n times as large. Three rules say what the
learning rate of one process becomes then:

    linear   n times as much: the sum of n small steps (Goyal et al. 2017), after a warm-up in which it grows from the
             rate of one process, as the first steps are too long otherwise
    sqrt     √n times as much: keeps the variance of the step (Krizhevsky 2014, Hoffer et al. 2017)
    none     as it is

In a worker of a study the rate is *in force*. A `Trainer` heeds it by itself (`probe.py`). Code without one asks:

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

WARM_UP = 1.0  # epochs, of the linear rule; Goyal et al. take 5 of 90


@dataclass(frozen=True)
class Rate:
    """What becomes of the learning rate that a training has for one process.

    Attributes:
        factor: it is multiplied by this.
        warmup: epochs in which it grows from 1 times to `factor` times, along a line.
        base: the rate of one process, in place of the training's own; None to keep that.
    """

    factor: float = 1.0
    warmup: float = 0.0
    base: float | None = None

    def ramp(self, epoch: float) -> float:
        """The part of the full rate that is used after `epoch` epochs, from 1/factor to 1."""
        if self.warmup <= 0.0 or epoch >= self.warmup:
            return 1.0
        return (1.0 + (self.factor - 1.0) * max(0.0, epoch) / self.warmup) / self.factor

    def at(self, own: float, epoch: float | None = None) -> float:
        """The rate to use where the training's own, for one process, is `own`; without an epoch, that after warm-up."""
        full = (own if self.base is None else self.base) * self.factor
        return full if epoch is None else full * self.ramp(epoch)


def factor(rule: Rule, np: int) -> float:
    """By how much the rate grows with `np` processes.

    >>> factor("linear", 4), factor("sqrt", 4), factor("none", 4)
    (4.0, 2.0, 1.0)
    """
    return {"linear": float(np), "sqrt": math.sqrt(np), "none": 1.0}[rule]


def check_rule(rule: Any, lr: Any, warmup: Any) -> tuple[Rule, float | None, float]:
    """Rule, base rate and warm-up in epochs, the last by default 1 for "linear" and else 0.

    Raises:
        ConfigError: one that can't be, or two that contradict each other.
    """
    if rule not in get_args(Rule):
        raise ConfigError(f"lr_rule={rule!r}: {did_you_mean(str(rule), get_args(Rule))}")
    if lr is not None and not _is_number(lr, above=0.0):
        raise ConfigError(
            f"lr={lr!r}: expected the learning rate of one process, above 0, or None for the training's own."
        )
    if warmup is None:
        return rule, lr, WARM_UP if rule == "linear" else 0.0
    if not (_is_number(warmup, above=0.0) or warmup == 0):
        raise ConfigError(f"warmup={warmup!r}: expected a number of epochs, 0 or more.")
    if rule == "none" and warmup:
        raise ConfigError(
            f'warmup={warmup} with lr_rule="none": the rate stays as it is, so there is nothing to warm up to.'
        )
    return rule, lr, float(warmup)


def _is_number(value: Any, above: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and above < value < math.inf


_in_force: Rate | None = None
_asked = False


@contextlib.contextmanager
def in_force(rate: Rate) -> Iterator[None]:
    """While entered, `learning_rate` answers by this rate."""
    global _in_force, _asked
    _in_force, _asked = rate, False
    try:
        yield
    finally:
        _in_force, _asked = None, False


def learning_rate(own: float, epoch: float | None = None) -> float:
    """The learning rate to use, of a training whose rate for one process is `own`. Outside a study: `own`.

    Who asks sees to the rate himself: trainers that are run afterwards leave it as it is. Without a call, they set it.

    Args:
        own: the rate for one process.
        epoch: how many epochs are trained, 2.5 say, for the warm-up; None for the rate after it.
    """
    global _asked
    if _in_force is None:
        return own
    _asked = True
    return _in_force.at(own, epoch)


def asked() -> bool:
    """Whether the code that is being studied has asked for its rate."""
    return _asked
