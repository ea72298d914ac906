"""`ledger`: stretches of time and sessions of training → seconds by cause. A pure function.

    stretches     queued │ start-up │ attempt 1          │ down │ attempt 2             │ …
    sessions                         setup ▪▪▪▪▪▪▪ killed         setup ▪▪▪▪▪▪▪▪▪▪▪ end

1. Each session goes to the attempt in which it ran: by its number, or else by its time.
2. The later attempts of the same `fit` name the steps from which they continued. Steps of a window beyond the lowest of
   them are lost. All time of lost steps is lost, also their waiting for input.
3. Each stretch is swept from its beginning to its end. Each part of a session gets the time that no part before it has, so
   that no second counts twice. A gap gets its cause from the rows around it.

The time between the last report and a kill counts as training if it is as short as between other reports. It is unknown
otherwise: the process may have hung. The number of steps in it is estimated from the reports before.

Times may come from machines whose clocks differ. A session that doesn't fit into its attempt is moved as a whole. Only the
durations of windows are trusted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from footplate.core.goodput.causes import Cause
from footplate.core.goodput.monitor_file import Session, Window
from footplate.core.goodput.result import AttemptEntry, Ledger, Slice, entries_of, sums
from footplate.core.goodput.stretches import Stretch, aligned

# Reports come at most once a second, so a shorter silence means nothing.
SILENCE_S = 2.0
# The number of windows whose speed counts for an estimate.
RECENT = 20


@dataclass(frozen=True)
class _Placed:
    """A session in its stretch.

    Attributes:
        session: the session.
        offset_s: is added to its times.
        kept_to: its steps up to this one count; None if all of them do.
        recent: its last windows; if it has none, those of a session beside it. They show the speed of training.
    """

    session: Session
    offset_s: float
    kept_to: int | None
    recent: Sequence[Window]

    def lost_share(self, first_step: float, step: float) -> float:
        """The share of the steps after `first_step`, up to `step`, that are lost."""
        if self.kept_to is None or step <= self.kept_to:
            return 0.0
        return 1.0 if first_step >= self.kept_to else (step - self.kept_to) / (step - first_step)


@dataclass(frozen=True)
class _Part:
    """A part of a session: its setup, a window, or its end.

    Attributes:
        began: its beginning.
        ended: its end.
        seconds: the seconds by cause.
        placed: the session.
        index: the number of windows up to this part; 0 for the setup.
        is_last: no part of this session follows.
    """

    began: float
    ended: float
    seconds: Mapping[Cause, float]
    placed: _Placed
    index: int
    is_last: bool


def ledger(
    stretches: Sequence[Stretch],
    files: Sequence[Sequence[Session]],
    devices: int = 1,
    usd_per_hour: float | None = None,
    machine: str = "",
    notes: Sequence[str] = (),
) -> Ledger:
    """Compute the ledger of a job or a run.

    Args:
        stretches: the time of the job, in order.
        files: for each monitor.jsonl, its sessions in the order of the file.
        devices: the number of devices that are held while no session says otherwise.
        usd_per_hour: the price of all machines together; None if it is unknown.
        machine: the machines that the price is for.
        notes: sentences for the result.

    Returns:
        The ledger. The seconds of its entries sum to the time from the first beginning to the last end.
    """
    whole = aligned(stretches) or [Stretch(0.0, 0.0, Cause.UNKNOWN)]
    placed = _place(whole, files)
    split = any(placed)
    slices: list[Slice] = []
    attempts: list[AttemptEntry] = []
    for stretch, sessions in zip(whole, placed, strict=True):
        if stretch.cause is not None:
            seconds = {stretch.cause: stretch.ended - stretch.began}
            own = [Slice(stretch.began, stretch.ended, stretch.attempt, seconds, devices, stretch.paid)]
        else:
            held = max([each.session.world_size for each in sessions] + [devices])
            own = [*_sweep(stretch, sessions, held, split)]
            attempts.append(_attempt(stretch, sessions, own))
        slices += [each for each in own if each.ended > each.began]

    began, ended = whole[0].began, whole[-1].ended
    return Ledger(
        began,
        ended,
        whole[-1].runs,
        entries_of(slices, ended - began, usd_per_hour),
        tuple(attempts),
        tuple(slices),
        split,
        machine,
        usd_per_hour,
        tuple(notes),
    )


# Sessions and attempts


def _place(stretches: Sequence[Stretch], files: Sequence[Sequence[Session]]) -> list[list[_Placed]]:
    """Find the stretch of each session. Returns the sessions of each stretch."""
    placed: list[list[_Placed]] = [[] for _ in stretches]
    attempts = [index for index, stretch in enumerate(stretches) if stretch.cause is None]
    if not attempts:
        return placed
    for sessions in files:
        # A file grows in the order of events, whatever its times are.
        position = 0
        positions = []
        for session in sessions:
            position = _position(stretches, attempts, position, session)
            positions.append(position)
        fits = _fits(stretches, [attempts[position] for position in positions], sessions)
        for number, session in enumerate(sessions):
            index = attempts[positions[number]]
            later = [
                other.step for other, fit in zip(sessions[number + 1 :], fits[number + 1 :], strict=True)
                if fit == fits[number]
            ]  # fmt: skip
            offset_s = _offset(stretches[index], session)
            kept_to = min(later, default=None)
            placed[index].append(_Placed(session, offset_s, kept_to, _recent(sessions, number)))
    return placed


def _recent(sessions: Sequence[Session], number: int) -> Sequence[Window]:
    """Return the windows that show how fast a session trained."""
    for session in (sessions[number], *reversed(sessions[:number])):
        if session.windows:
            return session.windows[-RECENT:]
    return next((session.windows[:RECENT] for session in sessions[number:] if session.windows), ())


def _position(stretches: Sequence[Stretch], attempts: Sequence[int], least: int, session: Session) -> int:
    """Return the position of a session's attempt in `attempts`, from `least` on."""
    candidates = range(least, len(attempts))
    for position in candidates:
        if session.attempt is not None and stretches[attempts[position]].attempt == session.attempt:
            return position

    def distance(position: int) -> tuple[float, float]:
        stretch = stretches[attempts[position]]
        overlap = min(stretch.ended, session.last) - max(stretch.began, session.began)
        return (-overlap, abs(stretch.began - session.began))

    return min(candidates, key=distance)


def _fits(stretches: Sequence[Stretch], indices: Sequence[int], sessions: Sequence[Session]) -> list[int]:
    """Number the sessions of a file by the calls of `fit` that they are. A later attempt repeats the numbers."""
    fits: list[int] = []
    for number, index in enumerate(indices):
        if number == 0 or index != indices[number - 1]:
            fits.append(stretches[index].fit)
        else:
            fits.append(fits[-1] + (sessions[number - 1].status == "finished"))
    return fits


def _offset(stretch: Stretch, session: Session) -> float:
    """Return the seconds by which a session is moved to fit into its attempt. Its beginning counts more than its end."""
    return max(stretch.began - session.began, min(0.0, stretch.ended - session.last))


# Time


def _sweep(stretch: Stretch, sessions: Sequence[_Placed], devices: int, split: bool) -> Iterator[Slice]:
    """Divide the time of an attempt."""
    cursor, before = stretch.began, None

    def cut(ended: float, seconds: Mapping[Cause, float]) -> Slice:
        return Slice(cursor, ended, stretch.attempt, seconds, devices, stretch.paid)

    if not split:
        yield cut(stretch.ended, {Cause.TRAINING: stretch.ended - cursor})
        return
    parts = sorted((part for placed in sessions for part in _parts(placed)), key=lambda part: part.began)
    for part in parts:
        began = min(max(cursor, part.began), stretch.ended)
        if began > cursor:
            yield cut(began, _gap(began - cursor, before, part, stretch))
            cursor = began
        ended = min(part.ended, stretch.ended)
        if ended > cursor:
            yield cut(ended, _scaled_to(part.seconds, ended - cursor))
            cursor = ended
        # Of two sessions at the same time, the one that lasts longer has the gap.
        if before is None or part.placed is before.placed or part.ended >= cursor:
            before = part
    if stretch.ended > cursor:
        yield cut(stretch.ended, _gap(stretch.ended - cursor, before, None, stretch))


def _parts(placed: _Placed) -> Iterator[_Part]:
    """Yield the parts of a session, one after the other. Each is as long as it was, whatever its times are."""
    session, offset_s = placed.session, placed.offset_s
    windows = session.windows
    time = session.time + offset_s
    setup_s = max(session.setup_s, session.process_s or 0.0)
    yield _Part(time - setup_s, time, {Cause.STARTUP: setup_s}, placed, 0, not windows and session.ended is None)

    for number, window in enumerate(windows, start=1):
        end = window.time + offset_s
        began = max(time, end - window.wall_s)
        # A clock that was set back leaves the duration.
        time = min(end, began + window.wall_s) if end > began else began + window.wall_s
        lost = placed.lost_share(window.first_step, window.step)
        scale = (time - began) / window.wall_s if window.wall_s else 0.0
        seconds = {cause: part * scale * (1 - lost) for cause, part in window.seconds.items()}
        seconds[Cause.LOST] = (time - began) * lost
        is_last = number == len(windows) and session.ended is None
        yield _Part(began, time, seconds, placed, number, is_last)

    if session.ended is not None:
        end = max(time, session.ended + offset_s)
        yield _Part(time, end, {Cause.SHUTDOWN: end - time}, placed, len(windows), True)


def _scaled_to(seconds: Mapping[Cause, float], length: float) -> dict[Cause, float]:
    """Scale seconds by cause so that they sum to a length."""
    total = math.fsum(seconds.values())
    return {cause: part * (length / total) for cause, part in seconds.items()} if total else {Cause.UNKNOWN: length}


def _gap(length: float, before: _Part | None, after: _Part | None, stretch: Stretch) -> dict[Cause, float]:
    """Divide a gap between two parts of sessions, or between a part and the end of the attempt."""
    if before is None:
        return {Cause.STARTUP: length}
    session = before.placed.session
    if not before.is_last:
        return {Cause.STARTUP if before.index == 0 else Cause.UNKNOWN: length}
    if session.status == "finished":
        return {Cause.SHUTDOWN if after is None else Cause.UNKNOWN: length}
    if session.ended is not None:
        return {Cause.SHUTDOWN if after is None else Cause.DOWN: length}

    # It was killed, or it runs and hasn't reported yet.
    placed = before.placed
    trained_s, steps = _unreported(placed, length, end_known=after is None)
    lost = _lost_unreported(placed, steps)
    seconds = _scaled_to(sums(window.seconds for window in placed.recent), trained_s * (1 - lost))
    seconds[Cause.LOST] = trained_s * lost
    if after is not None:
        rest = Cause.DOWN
    else:
        # Without a report, it may not have come to its first step.
        rest = Cause.UNKNOWN if session.windows else Cause.STARTUP
    seconds[rest] = seconds.get(rest, 0.0) + length - trained_s
    return seconds


def _unreported(placed: _Placed, silence_s: float, end_known: bool) -> tuple[float, float]:
    """Estimate the training after the last report of a session without an end: its seconds, and its steps.

    Args:
        placed: the session.
        silence_s: the time after its last row.
        end_known: the process lived until the end of that time. If False, it ended at some time between two reports.
    """
    walls = [window.wall_s for window in placed.recent]
    seconds = sum(walls)
    if seconds <= 0:
        return 0.0, 0.0
    longest_s = max(SILENCE_S, 2 * max(walls)) if end_known else statistics.median(walls) / 2
    trained_s = min(silence_s, longest_s)
    steps = placed.recent[-1].step - placed.recent[0].first_step
    return trained_s, trained_s * steps / seconds


def _lost_unreported(placed: _Placed, steps: float) -> float:
    """Return the lost share of the steps after the last report."""
    last_step = placed.session.last_step
    if placed.kept_to is None or placed.kept_to <= last_step:
        return 0.0 if placed.kept_to is None else 1.0
    return max(0.0, 1 - (placed.kept_to - last_step) / steps) if steps > 0 else 0.0


# Steps


def _attempt(stretch: Stretch, sessions: Sequence[_Placed], slices: Sequence[Slice]) -> AttemptEntry:
    """Sum up an attempt."""
    reached = [_reached(stretch, sessions, number) for number in range(len(sessions))]
    lost = [
        max(0.0, step - max(each.kept_to, each.session.step)) if each.kept_to is not None else 0.0
        for each, step in zip(sessions, reached, strict=True)
    ]
    kept = [
        step if each.kept_to is None else min(step, each.kept_to) for each, step in zip(sessions, reached, strict=True)
    ]
    return AttemptEntry(
        stretch.attempt,
        stretch.began,
        stretch.ended,
        sums(each.seconds for each in slices),
        sessions[0].session.step if sessions else None,
        round(max(reached)) if reached else None,
        round(max(kept)) if kept else None,
        sum(lost),
    )


def _reached(stretch: Stretch, sessions: Sequence[_Placed], number: int) -> float:
    """Return the step that a session reached, estimated if it was killed between two reports."""
    placed = sessions[number]
    session = placed.session
    if session.ended is not None:
        return session.last_step
    following = [other.session.began + other.offset_s for other in sessions[number + 1 :]]
    until = min(following, default=stretch.ended)
    silence_s = max(0.0, until - session.last - placed.offset_s)
    steps = _unreported(placed, silence_s, end_known=not following)[1]
    # A checkpoint from which a later attempt continued proves that its step was reached.
    return max(session.last_step + steps, placed.kept_to or 0)
