"""`monitor.jsonl`: where the time of a run went, over all of its attempts.

The monitor of a training appends a JSON object for each event: "start", "window", "epoch", "advice" and "end". Lines that
can't be read, unknown kinds and unknown keys are ignored, because a killed process leaves half a line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from footplate.core.goodput import NAME, read_rows


@dataclass(frozen=True)
class Start:
    """Training began in a process, or went on.

    Attributes:
        time: seconds since 1970.
        step: optimizer steps before it; above 0 if it was resumed.
        world_size: the number of ranks.
        device: the kind of device.
        precision: the types of parameters and of computation.
        setup_s: seconds from the beginning of `fit`.
        job: the id of the job that it belongs to; None outside a job.
        checkpoints: the places of checkpoints outside of the run's directory: paths and URIs.
    """

    time: float
    step: int
    world_size: int
    device: str
    precision: str
    setup_s: float
    job: str | None = None
    checkpoints: tuple[str, ...] = ()


@dataclass(frozen=True)
class Window:
    """Some batches, between two reports.

    Attributes:
        time: its end, in seconds since 1970.
        step: optimizer steps after it.
        batches: the number of its batches.
        wall_s: its duration.
        seconds: its duration by cause.
        samples: the rows of its batches; None if unknown. The same for the others below.
        tokens: the tokens of its batches.
        flops: floating-point operations.
        gc_s: seconds of garbage collection.
        memory_bytes: memory of the process.
        device_memory_bytes: peak of the device's memory.
        recompilations: programs that were compiled again.
    """

    time: float
    step: int
    batches: float
    wall_s: float
    seconds: Mapping[str, float]
    samples: float | None
    tokens: float | None
    flops: float | None
    gc_s: float
    memory_bytes: float | None
    device_memory_bytes: float | None
    recompilations: float


@dataclass(frozen=True)
class RankTimes:
    """The time of a rank, as one row compared it with other ranks: its own work, and its wait for input."""

    rank: int
    own_s: float | None
    input_s: float | None


@dataclass(frozen=True)
class Comparison:
    """All ranks, compared after an epoch."""

    epoch: int
    ranks: tuple[RankTimes, ...]


@dataclass(frozen=True)
class Advice:
    """What to change. `gain` is the expected factor of speed; None if it isn't known."""

    rule: str
    text: str
    gain: float | None


@dataclass(frozen=True)
class Attempt:
    """One call of `fit` in one process.

    Attributes:
        start: its beginning.
        windows: what it measured.
        comparisons: its comparisons of ranks.
        advice: what its end advised.
        status: "finished", "interrupted" or "failed"; None if it recorded no end: it was killed, or still runs.
        ended: the time of its last row.
        step: optimizer steps at its last row.
        peak_flops: the peak rate of all devices, in operations a second; None if its end doesn't tell it.
    """

    start: Start
    windows: tuple[Window, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    advice: tuple[Advice, ...] = ()
    status: str | None = None
    ended: float = 0.0
    step: int = 0
    peak_flops: float | None = None


@dataclass(frozen=True)
class MonitorLog:
    """All attempts of a run, in order. `faulty` counts the lines that could not be read."""

    attempts: tuple[Attempt, ...] = ()
    faulty: int = 0

    @property
    def windows(self) -> list[Window]:
        """The windows of all attempts."""
        return [window for attempt in self.attempts for window in attempt.windows]

    @property
    def last(self) -> Attempt | None:
        """The latest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def steps_trained_again(self) -> int:
        """Steps that a later attempt had to make again."""
        pairs = zip(self.attempts[:-1], self.attempts[1:], strict=True)
        return sum(max(0, before.step - after.start.step) for before, after in pairs)


def read_monitor(directory: Path) -> MonitorLog:
    """Read a run's file. Without one, there are no attempts."""
    rows, faulty = read_rows(directory / NAME)
    return MonitorLog(tuple(_attempts(rows)), faulty)


def merged(windows: Sequence[Window], count: int) -> list[Window]:
    """Merge neighbouring windows, so that at most about `count` are left. Times and samples are summed."""
    size = max(1, math.ceil(len(windows) / count))
    return [_merge(windows[first : first + size]) for first in range(0, len(windows), size)]


def total_seconds(windows: Sequence[Window]) -> dict[str, float]:
    """Sum the seconds of windows by cause, the greatest sum first."""
    sums: dict[str, float] = {}
    for window in windows:
        for cause, seconds in window.seconds.items():
            sums[cause] = sums.get(cause, 0.0) + seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _attempts(rows: Sequence[dict[str, Any]]) -> Iterator[Attempt]:
    """Divide the rows at each start. Rows before the first start belong to an attempt whose start is lost."""
    if not rows:
        return
    starts = [index for index, row in enumerate(rows) if row.get("kind") == "start"]
    if not starts or starts[0] > 0:
        starts.insert(0, 0)
    for first, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        yield _attempt(rows[first:stop])


def _attempt(rows: Sequence[dict[str, Any]]) -> Attempt:
    kinds: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row.get("kind"), []).append(row)
    start = _start(rows[0])
    ends = [row["status"] for row in kinds.get("end", []) if isinstance(row.get("status"), str)]
    times = [time for row in rows if (time := _number(row, "time")) is not None]
    steps = [step for row in rows if (step := _number(row, "step")) is not None]
    return Attempt(
        start,
        windows=tuple(map(_window, kinds.get("window", []))),
        comparisons=tuple(map(_comparison, kinds.get("epoch", []))),
        advice=tuple(_advice(row) for row in kinds.get("advice", []) if isinstance(row.get("text"), str)),
        status=ends[-1] if ends else None,
        ended=max(times, default=start.time),
        step=int(steps[-1]) if steps else start.step,
        peak_flops=next((peak for row in kinds.get("end", []) if (peak := _number(row, "peak_flops_per_s"))), None),
    )


def _start(row: dict[str, Any]) -> Start:
    places = row.get("checkpoints")
    return Start(
        time=_number(row, "time") or 0.0,
        step=int(_number(row, "step") or 0) if row.get("kind") == "start" else 0,
        world_size=int(_number(row, "world_size") or 1),
        device=str(row.get("device") or "unknown"),
        precision=str(row.get("precision") or "unknown"),
        setup_s=_number(row, "setup_s") or 0.0,
        job=job if isinstance(job := row.get("job"), str) else None,
        checkpoints=tuple(place for place in places if isinstance(place, str)) if isinstance(places, list) else (),
    )


def _window(row: dict[str, Any]) -> Window:
    seconds = row.get("seconds")
    causes = seconds if isinstance(seconds, dict) else {}
    return Window(
        time=_number(row, "time") or 0.0,
        step=int(_number(row, "step") or 0),
        batches=_number(row, "batches") or 0.0,
        wall_s=_number(row, "wall_s") or 0.0,
        seconds={str(cause): spent for cause in causes if (spent := _number(causes, cause)) is not None and spent > 0},
        samples=_number(row, "samples"),
        tokens=_number(row, "tokens"),
        flops=_number(row, "flops"),
        gc_s=_number(row, "gc_s") or 0.0,
        memory_bytes=_number(row, "memory_bytes"),
        device_memory_bytes=_number(row, "device_memory_bytes"),
        recompilations=_number(row, "recompilations") or 0.0,
    )


def _comparison(row: dict[str, Any]) -> Comparison:
    listed = row.get("ranks")
    ranks = [rank for rank in listed if isinstance(rank, dict)] if isinstance(listed, list) else []
    return Comparison(
        int(_number(row, "epoch") or 0),
        tuple(
            RankTimes(int(_number(rank, "rank") or 0), _number(rank, "own_s"), _number(rank, "input_s"))
            for rank in ranks
        ),
    )


def _advice(row: dict[str, Any]) -> Advice:
    return Advice(str(row.get("rule", "")), row["text"], _number(row, "gain"))


def _merge(windows: Sequence[Window]) -> Window:
    last = windows[-1]
    seconds: dict[str, float] = {}
    for window in windows:
        for cause, spent in window.seconds.items():
            seconds[cause] = seconds.get(cause, 0.0) + spent
    return replace(
        last,
        batches=sum(window.batches for window in windows),
        wall_s=sum(window.wall_s for window in windows),
        seconds=seconds,
        samples=_sum(window.samples for window in windows),
        tokens=_sum(window.tokens for window in windows),
        flops=_sum(window.flops for window in windows),
        gc_s=sum(window.gc_s for window in windows),
        memory_bytes=_greatest(window.memory_bytes for window in windows),
        device_memory_bytes=_greatest(window.device_memory_bytes for window in windows),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _greatest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _number(row: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number of a row; None if it has none."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
