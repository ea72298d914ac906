"""The time, the speed and the advice of a run, from its `monitor.jsonl`, for charts.

    TimeRecord(path).snapshot()    parts of the training in order, each with its seconds by the monitor's own causes

The ledger's reader (`monitor_file.py`) sums causes, and leaves out speed and advice. This reader keeps them, and merges
windows: a record has at most `MOST` parts of about the same length, no matter how long the run is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from footplate.core.goodput.monitor_file import RowsFile, count_of, number_of

MOST = 600
OTHER = "other"
CAUSES = (
    "forward", "backward", "optimizer", "step", "communication", "transfer", "input", "validation", "checkpoint",
    "callbacks", "logging", OTHER, "dispatch", "compilation",
)  # fmt: skip
"""The causes of a part, in the order of a chart. Causes that a later version adds are `OTHER`.

The last two are of compiled steps, which have no phases. So they can have the colours of the first two.
"""

# The monitor writes at most five.
_ADVICE = 5
_LONGEST_ADVICE = 1000
# The speed for the time that is left is that of this time.
_RECENT_S = 300.0
# A training is stuck, or is no more, if its last report is older than this and than a multiple of the usual time.
_LATE_S = 60.0
_LATE_REPORTS = 10


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a training.

    Attributes:
        session: the number of the call of `fit`.
        ended: its end, in seconds since the epoch.
        wall_s: its duration.
        first_step: optimizer steps before it.
        step: optimizer steps after it.
        seconds: its duration by cause. The sum is `wall_s`.
        samples: the rows that were trained on; None if unknown.
        tokens: the tokens that were trained on; None if unknown.
        flops: floating-point operations; None if unknown.
    """

    session: int
    ended: float
    wall_s: float
    first_step: int
    step: int
    seconds: Mapping[str, float]
    samples: float | None
    tokens: float | None
    flops: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a record has so far.

    Attributes:
        began: when the first session began, in seconds since the epoch; None without a session.
        parts: the parts, in order.
        advice: the latest advice.
        total_steps: the steps of the whole training; None if unknown.
        ended: True if the last session has ended.
        report_s: the usual time between two reports.
    """

    began: float | None
    parts: tuple[Part, ...]
    advice: tuple[str, ...]
    total_steps: int | None
    ended: bool
    report_s: float

    def remaining_s(self, now: float) -> float | None:
        """Estimate the seconds until the last step. None if that can't be known."""
        if not self.parts or self.total_steps is None or self.ended:
            return None
        last = self.parts[-1]
        if now - last.ended > max(_LATE_S, _LATE_REPORTS * self.report_s):
            return None
        recent = [part for part in self.parts if part.session == last.session and last.ended - part.ended <= _RECENT_S]
        steps = last.step - recent[0].first_step
        if steps <= 0:
            return None
        left_s = (self.total_steps - last.step) * math.fsum(part.wall_s for part in recent) / steps
        return max(0.0, left_s - max(0.0, now - last.ended))


class TimeRecord(RowsFile):
    """Reads the record of a run.

    Args:
        path: the file. It may not exist yet.
        since: rows before this time belong to another job, and are left out.
    """

    def __init__(self, path: Path, since: float = 0.0) -> None:
        super().__init__(path)
        self._since = since
        self._clear()

    def snapshot(self) -> Snapshot:
        """Return the record so far; empty if the file is missing or can't be read."""
        with self._lock:
            self.update()
            report_s = statistics.median(self._reports) if self._reports else 0.0
            return Snapshot(
                self._began, tuple(self._parts), tuple(self._advice), self._total_steps, self._ended, report_s
            )

    def forget(self) -> None:
        super().forget()
        self._clear()

    def _clear(self) -> None:
        self._parts: list[Part] = []
        self._advice: list[str] = []
        self._reports: list[float] = []
        self._began: float | None = None
        self._total_steps: int | None = None
        self._ended = False
        self._session = self._step = self._advised = 0
        self._span_s = 0.0

    def take(self, row: Mapping[str, Any]) -> bool:
        kind, time = row.get("kind"), number_of(row.get("time"))
        if not isinstance(kind, str) or time is None:
            return False
        if time < self._since:
            return True
        if kind == "start":
            self._start(row, time)
        elif kind == "window":
            return self._window(row, time)
        elif kind == "advice":
            self._take_advice(row)
        elif kind == "end":
            self._ended = True
        return True

    def _start(self, row: Mapping[str, Any], time: float) -> None:
        self._began = time if self._began is None else self._began
        self._session += 1
        self._step = count_of(row.get("step")) or 0
        self._total_steps = count_of(row.get("total_steps"))
        self._ended = False
        self._reports = []

    def _window(self, row: Mapping[str, Any], time: float) -> bool:
        wall_s, step, causes = number_of(row.get("wall_s")), count_of(row.get("step")), row.get("seconds")
        if wall_s is None or step is None or not isinstance(causes, dict):
            return False
        # The windows of an end may be empty.
        if wall_s == 0.0:
            return True
        if self._began is None:
            self._began = time - wall_s
        if step < self._step:
            self._step = step
        rates = [number_of(row.get(name)) for name in ("samples", "tokens", "flops")]
        self._append(Part(self._session, time, wall_s, self._step, step, _split(causes, wall_s), *rates))
        self._reports = [*self._reports[-20:], wall_s]
        self._step = step
        if len(self._parts) >= MOST:
            self._compact()
        return True

    def _take_advice(self, row: Mapping[str, Any]) -> None:
        text = row.get("text")
        if not isinstance(text, str):
            return
        # The advice of a later session replaces that of an earlier one.
        if self._advised != self._session:
            self._advice, self._advised = [], self._session
        if len(self._advice) < _ADVICE:
            self._advice.append(text[:_LONGEST_ADVICE])

    def _append(self, part: Part, across: bool = False) -> None:
        last = self._parts[-1] if self._parts else None
        if last and (across or last.session == part.session) and last.wall_s + part.wall_s <= self._span_s:
            self._parts[-1] = _merge(last, part)
        else:
            self._parts.append(part)

    def _compact(self) -> None:
        """Merge parts until there are at most half as many."""
        parts = self._parts
        self._span_s = max(self._span_s, statistics.median(part.wall_s for part in parts))
        # Parts of many short sessions are merged across sessions.
        for across in (False, False, True):
            self._span_s *= 2
            parts, self._parts = self._parts, []
            for part in parts:
                self._append(part, across)
            if len(self._parts) <= MOST // 2:
                return
        self._parts = [_merge(*pair) if len(pair) == 2 else pair[0] for pair in _pairs(self._parts)]


def _pairs(parts: list[Part]) -> list[list[Part]]:
    return [parts[index : index + 2] for index in range(0, len(parts), 2)]


def _merge(first: Part, second: Part) -> Part:
    causes = {**first.seconds, **second.seconds}
    return replace(
        second,
        first_step=first.first_step,
        wall_s=first.wall_s + second.wall_s,
        seconds={cause: first.seconds.get(cause, 0.0) + second.seconds.get(cause, 0.0) for cause in causes},
        samples=_sum(first.samples, second.samples),
        tokens=_sum(first.tokens, second.tokens),
        flops=_sum(first.flops, second.flops),
    )


def _sum(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second


def _split(causes: Mapping[str, Any], wall_s: float) -> dict[str, float]:
    """Make the seconds of a window by cause. Their sum is the window's duration."""
    seconds: dict[str, float] = {}
    for name, value in causes.items():
        cause = name if name in CAUSES else OTHER
        seconds[cause] = seconds.get(cause, 0.0) + (number_of(value) or 0.0)
    total = math.fsum(seconds.values())
    # The parts and the duration are rounded.
    if total > wall_s:
        return {name: value * (wall_s / total) for name, value in seconds.items()}
    if wall_s - total > 1e-3 * wall_s:
        seconds[OTHER] = seconds.get(OTHER, 0.0) + wall_s - total
    return seconds
