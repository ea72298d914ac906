"""The result of a ledger: seconds, device-seconds and money by cause, and what each attempt did."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from footplate.core.goodput.causes import LABELS, NOT_DUE, Cause


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of time with its causes. Slices follow each other without gaps.

    Attributes:
        began: its beginning, in seconds since the epoch.
        ended: its end.
        attempt: the number of the attempt.
        seconds: its duration by cause.
        devices: devices that were held.
        paid: it costs money.
    """

    began: float
    ended: float
    attempt: int
    seconds: Mapping[Cause, float]
    devices: int = 1
    paid: bool = True


@dataclass(frozen=True)
class Entry:
    """A cause, and its part of the whole.

    Attributes:
        cause: the cause.
        seconds: its time.
        share: its part of all time, from 0 to 1.
        device_seconds: its time on all devices that were held.
        usd: its price; None if the price is unknown.
    """

    cause: Cause
    seconds: float
    share: float
    device_seconds: float
    usd: float | None

    @property
    def label(self) -> str:
        """A description for people."""
        return LABELS[self.cause]


@dataclass(frozen=True)
class AttemptEntry:
    """An attempt of a job, or a call of `fit` of a run without a job.

    Attributes:
        attempt: its number.
        began: the beginning of its processes.
        ended: their end; now, if they run.
        seconds: its duration by cause.
        first_step: the step from which it continued; None if it never began to train, or if there is no record.
        last_step: the last step that it reached; an estimate if it was killed between two reports.
        kept_step: the last one of its steps that counts, estimated likewise.
        lost_steps: its steps that a later attempt did again, estimated likewise.
    """

    attempt: int
    began: float
    ended: float
    seconds: Mapping[Cause, float]
    first_step: int | None = None
    last_step: int | None = None
    kept_step: int | None = None
    lost_steps: float = 0.0


@dataclass(frozen=True)
class Ledger:
    """The time of a job or a run, by cause.

    Attributes:
        began: its beginning, in seconds since the epoch.
        ended: its end; the time of the query, if it goes on.
        runs: it goes on.
        entries: the causes that have time. Their sum is `wall_s`.
        attempts: the attempts, in order.
        slices: the same time in the order in which it passed.
        split: the training time is split. If False, there is no monitor.jsonl, and all time of processes is "training".
        machine: the machines that the price is for; empty if it is unknown.
        usd_per_hour: the price of all machines together; None if it is unknown.
        notes: what is missing, in sentences.
    """

    began: float
    ended: float
    runs: bool
    entries: tuple[Entry, ...]
    attempts: tuple[AttemptEntry, ...]
    slices: tuple[Slice, ...] = field(repr=False)
    split: bool = True
    machine: str = ""
    usd_per_hour: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def wall_s(self) -> float:
        """All time."""
        return self.ended - self.began

    @property
    def goodput(self) -> float | None:
        """The share of training steps that count, from 0 to 1, of the time in which the job was to run.

        Time in the queue doesn't count. None if the training time isn't split, or if nothing was to run yet.
        """
        return goodput_of(self.seconds) if self.split else None

    @property
    def seconds(self) -> dict[Cause, float]:
        """The time by cause."""
        return {entry.cause: entry.seconds for entry in self.entries}

    @property
    def lost_steps(self) -> int:
        """Training steps that were lost, and done again or still to be done again."""
        return round(math.fsum(attempt.lost_steps for attempt in self.attempts))

    @property
    def last_step(self) -> int | None:
        """The highest step that counts; None if there is no record."""
        return max((each.kept_step for each in self.attempts if each.kept_step is not None), default=None)

    @property
    def usd(self) -> float | None:
        """The price of all time; None if it is unknown."""
        return None if self.usd_per_hour is None else math.fsum(entry.usd or 0.0 for entry in self.entries)

    @property
    def usd_lost(self) -> float | None:
        """The price of the steps that were lost; None if it is unknown."""
        return None if self.usd_per_hour is None else math.fsum(
            entry.usd or 0.0 for entry in self.entries if entry.cause == Cause.LOST
        )  # fmt: skip

    def between(self, since: float, until: float) -> dict[Cause, float]:
        """Return the seconds by cause of a part of the time.

        Args:
            since: its beginning, in seconds since the epoch.
            until: its end.
        """
        parts = []
        for each in self.slices:
            length = min(each.ended, until) - max(each.began, since)
            if length > 0:
                scale = length / (each.ended - each.began)
                parts.append({cause: seconds * scale for cause, seconds in each.seconds.items()})
        return sums(parts)

    def goodput_of_last(self, seconds: float) -> float | None:
        """Return the goodput of the latest seconds; see `goodput`."""
        return goodput_of(self.between(self.ended - seconds, self.ended)) if self.split else None

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger as plain values, for JSON and YAML. Times are seconds since the epoch."""
        return {
            "began": self.began,
            "ended": self.ended,
            "runs": self.runs,
            "wallSeconds": _rounded(self.wall_s),
            "goodput": _rounded(self.goodput),
            "split": self.split,
            "usd": _rounded(self.usd),
            "usdLost": _rounded(self.usd_lost),
            "usdPerHour": self.usd_per_hour,
            "machine": self.machine,
            "lastStep": self.last_step,
            "lostSteps": self.lost_steps,
            "causes": [
                {
                    "cause": str(entry.cause),
                    "label": entry.label,
                    "seconds": _rounded(entry.seconds),
                    "share": _rounded(entry.share),
                    "deviceSeconds": _rounded(entry.device_seconds),
                    "usd": _rounded(entry.usd),
                }
                for entry in self.entries
            ],
            "attempts": [
                {
                    "attempt": each.attempt,
                    "began": each.began,
                    "ended": each.ended,
                    "seconds": {str(cause): _rounded(seconds) for cause, seconds in each.seconds.items()},
                    "firstStep": each.first_step,
                    "lastStep": each.last_step,
                    "lostSteps": round(each.lost_steps),
                }
                for each in self.attempts
            ],
            "notes": list(self.notes),
        }


def sums(parts: Iterable[Mapping[Cause, float]]) -> dict[Cause, float]:
    """Add seconds by cause, in the order of the causes. Causes without time are left out."""
    collected: dict[Cause, list[float]] = {}
    for part in parts:
        for cause, seconds in part.items():
            collected.setdefault(cause, []).append(seconds)
    totals = {cause: math.fsum(collected[cause]) for cause in Cause if cause in collected}
    return {cause: seconds for cause, seconds in totals.items() if seconds > 0}


def goodput_of(seconds: Mapping[Cause, float]) -> float | None:
    """Return the goodput of seconds by cause; None if nothing was to run."""
    due = math.fsum(value for cause, value in seconds.items() if cause not in NOT_DUE)
    return seconds.get(Cause.TRAINING, 0.0) / due if due > 0 else None


def entries_of(slices: Iterable[Slice], wall_s: float, usd_per_hour: float | None) -> tuple[Entry, ...]:
    """Add up slices.

    Args:
        slices: the slices.
        wall_s: the time of all of them.
        usd_per_hour: the price of paid time; None if it is unknown.
    """
    slices = [*slices]
    total = sums(each.seconds for each in slices)
    held = sums(_scaled(each.seconds, each.devices) for each in slices if each.paid)
    paid = sums(each.seconds for each in slices if each.paid)
    return tuple(
        Entry(
            cause,
            seconds,
            seconds / wall_s if wall_s > 0 else 0.0,
            held.get(cause, 0.0),
            None if usd_per_hour is None else paid.get(cause, 0.0) / 3600 * usd_per_hour,
        )
        for cause, seconds in total.items()
    )


def _rounded(value: float | None) -> float | None:
    """Round to microseconds, or millionths, for people who read JSON."""
    return None if value is None else round(value, 6)


def _scaled(seconds: Mapping[Cause, float], factor: float) -> dict[Cause, float]:
    return {cause: value * factor for cause, value in seconds.items()}
