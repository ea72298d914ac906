"""The measurements of a study and their summary: frozen data, and pure functions over it.

A `Training` is one run of the function. A `Size` summarises the trainings of one number of processes, by medians and
quartiles. A `Study` has all of them. The *base*, to which all sizes are compared, is the smallest size that succeeded.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from footplate.scaling.learning_rates import Rate, Rule, factor

PHASES: tuple[str, ...] = ("step", "data", "validation", "other")

# Below this efficiency, adding devices doesn't pay any more.
PAYS = 0.5


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        np: the number of processes.
        repeat: the number of the repeat, from 0.
        failure: the reason of a failure, in one line; empty if it succeeded. A failed training has only `wall_s`.
        began_s: the start time, in seconds since 1970.
        wall_s: the time from the call to the result, with the start of the processes.
        seconds: the time of training alone, on rank 0, from the first epoch to the last; without a trainer, the time of the
            function.
        samples: the rows that all processes trained on; None if unknown.
        loss: the validation loss at the end; None if unknown or not finite.
        diverged: True if the loss was not finite.
        epochs: the number of epochs; None without a trainer.
        steps: the number of optimizer steps; None without a trainer.
        batches: the number of batches of rank 0; None without a trainer.
        phases: the seconds of rank 0 in each of `PHASES`; empty without a trainer.
        threads: the number of torch's CPU threads on rank 0.
        device: `"cpu"` or `"cuda"`; empty without a trainer.
    """

    np: int
    repeat: int
    failure: str = ""
    began_s: float = 0.0
    wall_s: float = 0.0
    seconds: float = 0.0
    samples: int | None = None
    loss: float | None = None
    diverged: bool = False
    epochs: int | None = None
    steps: int | None = None
    batches: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    threads: int = 1
    device: str = ""

    @property
    def samples_per_second(self) -> float | None:
        """The rows of all processes per second of training and validation."""
        return None if self.samples is None or self.seconds <= 0 else self.samples / self.seconds


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of some repeats."""

    low: float
    median: float
    high: float

    def apart(self, other: Spread) -> bool:
        """Return True if the ranges between the quartiles don't overlap."""
        return self.low > other.high or other.low > self.high


@dataclass(frozen=True)
class Size:
    """The summary of all trainings of one number of processes.

    Attributes:
        np: the number of processes.
        lr_factor: the factor of the learning rate.
        done: the number of trainings that succeeded.
        failures: the reasons of failures, each one once.
        seconds: the time of training; like all figures below, None if no training succeeded.
        wall_s: the time with the start of the processes.
        samples_per_second: the throughput of all processes together.
        loss: the final validation loss.
        diverged: the number of trainings whose final loss was not finite.
        speedup: the throughput divided by that of the base; if the rows are unknown, the time of the base divided by the
            time.
        efficiency: the speed-up divided by the growth in processes; 1 if twice as many processes are twice as fast.
        phases: the medians of the seconds in each phase.
        step_s: the time of a batch on rank 0, from its arrival to the end of its step.
        epochs: the median number of epochs.
        steps: the median number of optimizer steps.
        threads: the number of torch's CPU threads in each process.
        device: the kind of device.
    """

    np: int
    lr_factor: float
    done: int = 0
    failures: tuple[str, ...] = ()
    seconds: Spread | None = None
    wall_s: Spread | None = None
    samples_per_second: Spread | None = None
    loss: Spread | None = None
    diverged: int = 0
    speedup: float | None = None
    efficiency: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    step_s: float | None = None
    epochs: float | None = None
    steps: float | None = None
    threads: int = 1
    device: str = ""

    @property
    def shares(self) -> dict[str, float]:
        """The part of each phase in the time; empty if unknown."""
        total = sum(self.phases.values())
        return {name: seconds / total for name, seconds in self.phases.items()} if total > 0 else {}


@dataclass(frozen=True)
class Setup:
    """The settings of a study.

    Attributes:
        name: the name of the function or script.
        np: the sizes, the smallest first.
        backend: the name of the backend.
        repeat: the number of trainings of each size.
        lr_rule: the rule by which the learning rate grows with the size.
        lr: the learning rate of one process; None for that of the training itself.
        warmup: the warm-up of the learning rate, in epochs.
        monitor: the metric that is the validation loss.
        cores: the number of this machine's cores, if the processes were on it; else None.
        date: the time of the beginning, in ISO 8601.
    """

    name: str
    np: tuple[int, ...]
    backend: str
    repeat: int
    lr_rule: Rule
    lr: float | None
    warmup: float
    monitor: str
    cores: int | None
    date: str

    def rate(self, np: int) -> Rate:
        """The change of the learning rate with `np` processes."""
        return Rate(factor(self.lr_rule, np), self.warmup, self.lr)


@dataclass(frozen=True)
class Study:
    """The result of a study.

    Attributes:
        setup: the settings.
        trainings: all trainings, in the order in which they ran.
        sizes: the summaries of the sizes, the smallest first.
        notes: sentences that you need to interpret the figures.
        reading: the findings, as sentences.
        directory: the directory of `scaling.json`, `scaling.md`, `scaling.png` and the logs.
    """

    setup: Setup
    trainings: tuple[Training, ...]
    sizes: tuple[Size, ...]
    notes: tuple[str, ...]
    reading: str
    directory: Path

    @property
    def failed(self) -> bool:
        """True if no training succeeded."""
        return not any(size.done for size in self.sizes)

    def _repr_html_(self) -> str:
        from footplate.scaling.report import to_html  # which needs this module

        return to_html(self)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Compute the median and quartiles of the known values; None if there are none."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    if len(known) == 1:
        return Spread(known[0], known[0], known[0])
    low, _, high = statistics.quantiles(known, n=4, method="inclusive")
    return Spread(low, statistics.median(known), high)


def summarise(trainings: Sequence[Training], factors: Mapping[int, float]) -> tuple[Size, ...]:
    """Summarise trainings by size, the smallest first.

    Args:
        trainings: the trainings, in any order.
        factors: the factor of the learning rate for each number of processes.
    """
    sizes = [
        _size(np, lr_factor, [training for training in trainings if training.np == np])
        for np, lr_factor in sorted(factors.items())
    ]
    base = base_of(sizes)
    return tuple(size if base is None else _compared(size, base) for size in sizes)


def base_of(sizes: Iterable[Size]) -> Size | None:
    """Find the smallest size that succeeded, to which all are compared; None if none succeeded."""
    return min((size for size in sizes if size.done), key=lambda size: size.np, default=None)


def serial_share(speedups: Mapping[float, float]) -> float | None:
    """Fit the serial share of the work by Amdahl's law: 1/speedup = share + (1 - share)/k.

    Args:
        speedups: the speed-up of k times as many processes, by k.

    Returns:
        The share with the least squares of 1/speedup, from 0 to 1; None if there is nothing to fit.
    """
    pairs = [(1 - 1 / k, 1 / speedup - 1 / k) for k, speedup in speedups.items() if k > 1]
    if not pairs:
        return None
    return min(1.0, max(0.0, sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)))


def stops_paying(sizes: Sequence[Size]) -> Size | None:
    """Find the first size that isn't worth its devices; None if all are.

    Its efficiency is below one half, or it isn't faster than the size before it.
    """
    done = [size for size in sizes if size.speedup is not None and size.efficiency is not None]
    return next((size for before, size in pairwise(done) if not _worth_it(size, before)), None)


def _worth_it(size: Size, before: Size) -> bool:
    assert size.speedup is not None
    assert size.efficiency is not None
    assert before.speedup is not None
    return size.efficiency >= PAYS and size.speedup > before.speedup


def _size(np: int, lr_factor: float, trainings: list[Training]) -> Size:
    done = [training for training in trainings if not training.failure]
    failures = tuple(dict.fromkeys(training.failure for training in trainings if training.failure))
    if not done:
        return Size(np, lr_factor, failures=failures)

    phased = [training for training in done if training.phases]
    return Size(
        np,
        lr_factor,
        len(done),
        failures,
        seconds=spread(training.seconds for training in done),
        wall_s=spread(training.wall_s for training in done),
        samples_per_second=spread(training.samples_per_second for training in done),
        loss=spread(training.loss for training in done),
        diverged=sum(training.diverged for training in done),
        phases={name: statistics.median(training.phases[name] for training in phased) for name in PHASES if phased},
        step_s=_median(training.phases["step"] / training.batches for training in phased if training.batches),
        epochs=_median(training.epochs for training in done if training.epochs is not None),
        steps=_median(training.steps for training in done if training.steps is not None),
        threads=done[0].threads,
        device=done[0].device,
    )


def _compared(size: Size, base: Size) -> Size:
    assert base.seconds is not None
    if size.seconds is None:
        return size
    if size.samples_per_second and base.samples_per_second:
        speedup = size.samples_per_second.median / base.samples_per_second.median
    else:
        speedup = base.seconds.median / size.seconds.median
    return replace(size, speedup=speedup, efficiency=speedup * base.np / size.np)


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None
