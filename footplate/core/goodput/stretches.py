"""Stretches: the time of a job or a run, cut at the events that its supervisor knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from footplate.core.goodput.causes import Cause


@dataclass(frozen=True)
class Stretch:
    """A stretch of time.

    Attributes:
        began: its beginning, in seconds since the epoch.
        ended: its end; now, if it goes on.
        cause: the cause of all of its seconds; None while the processes of an attempt ran, whose record has the causes.
        attempt: the number of the attempt; 0 before the first one.
        paid: machines were held, so the stretch costs money.
        runs: it goes on.
        fit: for a run without a job, the number of calls of `fit` that had finished before it.
    """

    began: float
    ended: float
    cause: Cause | None = None
    attempt: int = 0
    paid: bool = True
    runs: bool = False
    fit: int = 0


def aligned(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Return stretches without gaps and overlaps.

    The times of a job come from several machines, whose clocks differ. If a stretch overlaps the one before it, it begins
    later. A gap is filled with a stretch of unknown cause.
    """
    whole: list[Stretch] = []
    for stretch in stretches:
        if whole and stretch.began > whole[-1].ended:
            whole.append(Stretch(whole[-1].ended, stretch.began, Cause.UNKNOWN, stretch.attempt, stretch.paid))
        began = whole[-1].ended if whole else stretch.began
        whole.append(replace(stretch, began=began, ended=max(began, stretch.ended)))
    return whole
