"""What a study has measured, and what follows from it: frozen data, and pure functions over it.

A `Training` is one run of the function; the trainings of one number of processes make a `Size`, by medians and quartiles.
Everything is compared with the smallest size that succeeded, the *base*.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

PHASES: tuple[str, ...] = ("step", "data", "validation", "other")
PAYS = 0.5  # the efficiency below which adding devices has stopped paying


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        np: how many processes.
        repeat: from 0.
        failure: why it failed, in a line; empty when it didn't. Only `wall_s` is known of one that failed.
        began_s: when it was started, in seconds since 1970.
        wall_s: from the call to the result: with the start of the processes.
        seconds: of training alone, on rank 0: first epoch to last; of a function without a trainer, all of it.
        samples: rows that were trained on, by all processes; None when nobody counted.
        loss: the validation loss at its end; None when nobody said, or it was no finite number.
        diverged: whether it was no finite number.
        epochs: None without a trainer.
        steps: of the optimizer; None without a trainer.
        batches: of rank 0; None without a trainer.
        phases: rank 0's seconds in each of `PHASES`; empty without a trainer.
        threads: that torch computed with on rank 0's CPU.
        device: `"cpu"`, `"cuda"`; empty without a trainer.
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
        """Rows of all processes in a second of training, with its validation."""
        return None if self.samples is None or self.seconds <= 0 else self.samples / self.seconds


@dataclass(frozen=True)
class Spread:
    """The median of some repeats, and their quartiles."""

    low: float
    median: float
    high: float

    def apart(self, other: Spread) -> bool:
        """Whether the halves in the middle of both don't touch."""
        return self.low > other.high or other.low > self.high


@dataclass(frozen=True)
class Size:
    """All trainings of one number of processes.

    Attributes:
        np: how many processes.
        lr_factor: by which the learning rate was multiplied.
        done: how many trainings succeeded.
        failures: why the others didn't, each reason once.
        seconds: of training; like the rest, None when none succeeded.
        wall_s: with the start of the processes.
        samples_per_second: of all processes together.
        loss: the final validation loss.
        diverged: how many ended with one that was no finite number.
        speedup: how many times as fast as the base it had its rows done, or, where nobody counted them, itself.
        efficiency: the part of the added processes that `speedup` makes use of: 1 when twice as many are twice as fast.
        phases: medians of seconds.
        step_s: what a batch takes on rank 0, from its arrival to the end of its step.
        epochs: median; likewise `steps`.
        threads: that torch computed with in each process.
        device: what it was trained on.
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
        """The part of the time in each phase; empty when they are not known."""
        total = sum(self.phases.values())
        return {name: seconds / total for name, seconds in self.phases.items()} if total > 0 else {}


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median and quartiles of what is known; None when nothing is."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    if len(known) == 1:
        return Spread(known[0], known[0], known[0])
    low, _, high = statistics.quantiles(known, n=4, method="inclusive")
    return Spread(low, statistics.median(known), high)


def summarise(trainings: Sequence[Training], factors: Mapping[int, float]) -> tuple[Size, ...]:
    """The sizes of a study, the smallest first.

    Args:
        trainings: in any order.
        factors: of the learning rate, for each number of processes.
    """
    sizes = [_size(np, by, [one for one in trainings if one.np == np]) for np, by in sorted(factors.items())]
    base = base_of(sizes)
    return tuple(size if base is None else _compared(size, base) for size in sizes)


def base_of(sizes: Iterable[Size]) -> Size | None:
    """The smallest size that succeeded, with which the others are compared; None when none did."""
    return min((size for size in sizes if size.done), key=lambda size: size.np, default=None)


def serial_share(speedups: Mapping[float, float]) -> float | None:
    """The part of the work that more processes don't make faster, by Amdahl's law: 1/speedup = share + (1 - share)/k.

    Args:
        speedups: for k times as many processes, how many times as fast they are.

    Returns:
        The share that fits best (least squares of 1/speedup), from 0 to 1; None when there is nothing to fit.
    """
    pairs = [(1 - 1 / k, 1 / speedup - 1 / k) for k, speedup in speedups.items() if k > 1]
    if not pairs:
        return None
    return min(1.0, max(0.0, sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)))


def stops_paying(sizes: Sequence[Size]) -> Size | None:
    """The first size that isn't worth its devices: efficiency below one half, or no faster than the one before.

    None when all are.
    """
    done = [size for size in sizes if size.speedup is not None and size.efficiency is not None]
    return next((size for before, size in pairwise(done) if not _worth_it(size, before)), None)


def _worth_it(size: Size, before: Size) -> bool:
    assert size.speedup is not None
    assert size.efficiency is not None
    assert before.speedup is not None
    return size.efficiency >= PAYS and size.speedup > before.speedup


def _size(np: int, lr_factor: float, trainings: list[Training]) -> Size:
    done = [one for one in trainings if not one.failure]
    failures = tuple(dict.fromkeys(one.failure for one in trainings if one.failure))
    if not done:
        return Size(np, lr_factor, failures=failures)
    with_phases = [one for one in done if one.phases]
    return Size(
        np,
        lr_factor,
        len(done),
        failures,
        seconds=spread(one.seconds for one in done),
        wall_s=spread(one.wall_s for one in done),
        samples_per_second=spread(one.samples_per_second for one in done),
        loss=spread(one.loss for one in done),
        diverged=sum(one.diverged for one in done),
        phases={name: statistics.median(one.phases[name] for one in with_phases) for name in PHASES if with_phases},
        step_s=_median(one.phases["step"] / one.batches for one in with_phases if one.batches),
        epochs=_median(one.epochs for one in done if one.epochs is not None),
        steps=_median(one.steps for one in done if one.steps is not None),
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
