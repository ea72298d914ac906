"""Training in a worker, with the study's additions, and its results.

    set the rate, add callbacks to every trainer  →  run the user's function or script  →  returned figures, measured
    figures

Figures that the function returns win over measured ones. It may return a number, which is the validation loss, or a dict
with any of `val_loss` (or the monitored name), `samples` (rows that all processes trained on) and `seconds`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from footplate.callbacks.ambient import everywhere
from footplate.scaling.learning_rates import Rate, asked, in_force
from footplate.scaling.results import Training
from footplate.scaling.study_callbacks import Pace, Probe


@dataclass(frozen=True)
class Outcome:
    """The results that rank 0 returns.

    Attributes:
        training: the figures.
        trained: True if a trainer ran.
        returned: True if the function returned any figure.
        logged: the names of the last trainer's metrics.
        paced: True if the learning rate followed the rule: a trainer ran, the code asked for the rate, or the rule doesn't
            change it.
    """

    training: Training
    trained: bool
    returned: bool
    logged: tuple[str, ...]
    paced: bool


@dataclass(frozen=True)
class TrainingTask:
    """The user's function with the settings of a size. Each process of that size calls it.

    The attributes are arguments of `scale`.
    """

    fn: Callable[[], Any]
    np: int
    repeat: int
    rate: Rate
    monitor: str

    def __call__(self) -> Outcome:
        """Train once, and return the results."""
        probe = Probe(self.monitor)
        with in_force(self.rate), everywhere(Pace(self.rate), probe):
            began = time.perf_counter()
            value = self.fn()
            seconds = time.perf_counter() - began
            paced = self.rate.factor == 1.0 or asked() or probe.trainings > 0

        returned = figures_in(value, self.monitor)
        trained = probe.trainings > 0
        samples = returned.get("samples", probe.samples if trained else None)
        loss = returned.get("val_loss", probe.loss)
        finite = loss is not None and math.isfinite(loss)
        training = Training(
            self.np,
            self.repeat,
            seconds=returned.get("seconds", probe.seconds if trained else seconds),
            samples=None if samples is None else round(samples),
            loss=loss if finite else None,
            diverged=loss is not None and not finite,
            epochs=probe.epochs if trained else None,
            steps=probe.steps if trained else None,
            batches=probe.batches if trained else None,
            phases=probe.phases if trained else {},
            threads=probe.threads,
            device=probe.device,
        )
        return Outcome(training, trained, bool(returned), probe.logged, paced)


def check_unpickles(task: TrainingTask) -> None:
    """Do nothing. A study calls this in a worker before it begins, to check that the task can be unpickled there."""


def figures_in(value: Any, monitor: str) -> dict[str, float]:
    """Find the figures in the value of a function, by name: `val_loss`, `samples`, `seconds`.

    >>> figures_in({"val_loss": 0.5, "samples": 100, "model": "a.pt"}, "val_loss")
    {'val_loss': 0.5, 'samples': 100.0}
    >>> figures_in(0.25, "val_loss")
    {'val_loss': 0.25}
    """
    if not isinstance(value, Mapping):
        number = _number(value)
        return {} if number is None else {"val_loss": number}
    named = {"val_loss": value.get(monitor, value.get("val_loss"))}
    named |= {name: value.get(name) for name in ("samples", "seconds")}
    numbers = {name: _number(figure) for name, figure in named.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _number(value: Any) -> float | None:
    """Convert a number, or a tensor or array of one number, to a float; None for all other values."""
    if value is None or isinstance(value, (bool, str)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
