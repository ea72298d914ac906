"""One training in a worker, with what a study adds to it, and what of it goes home.

    rate in force, callbacks in every trainer  →  the user's function, or script  →  what it returned, what the probe saw

What the function returns counts before what the probe saw. It may return a number, the validation loss, or a dict with any
of `val_loss` (or the name that is monitored), `samples` (that all processes trained on) and `seconds`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from footplate.callbacks.ambient import everywhere
from footplate.scaling.results import Training
from footplate.scaling.study_callbacks import Pace, Probe
from footplate.scaling.learning_rates import Rate, asked, in_force


@dataclass(frozen=True)
class Outcome:
    """What goes home from rank 0.

    Attributes:
        training: the figures.
        trained: whether a trainer was run.
        returned: whether the function returned any figure.
        logged: the metrics of the last trainer, by name.
        paced: whether the learning rate is the rule's: a trainer was run, the code asked for it, or it stays what it is.
    """

    training: Training
    trained: bool
    returned: bool
    logged: tuple[str, ...]
    paced: bool


@dataclass(frozen=True)
class Measured:
    """A function, to be called in each process of a size. Arguments: see `scale`."""

    fn: Callable[[], Any]
    np: int
    repeat: int
    rate: Rate
    monitor: str

    def __call__(self) -> Outcome:
        """Train once, and tell of it."""
        probe = Probe(self.monitor)
        with in_force(self.rate), everywhere(Pace(self.rate), probe):
            began = time.perf_counter()
            value = self.fn()
            seconds = time.perf_counter() - began
            paced = self.rate.factor == 1.0 or asked() or probe.trainings > 0
        said = figures_in(value, self.monitor)
        trained = probe.trainings > 0
        samples = said.get("samples", probe.samples if trained else None)
        loss = said.get("val_loss", probe.loss)
        finite = loss is not None and math.isfinite(loss)
        training = Training(
            self.np,
            self.repeat,
            seconds=said.get("seconds", probe.seconds if trained else seconds),
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
        return Outcome(training, trained, bool(said), probe.logged, paced)


def arrive(measured: Measured) -> None:
    """Be unpickled, and no more: what a study asks of a worker before it begins."""


def figures_in(value: Any, monitor: str) -> dict[str, float]:
    """The figures in what a function returned, by name: `val_loss`, `samples`, `seconds`.

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
    numbers = {name: _number(found) for name, found in named.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _number(value: Any) -> float | None:
    """A number, or a tensor or array of one, as a float; None for anything else."""
    if value is None or isinstance(value, (bool, str)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
