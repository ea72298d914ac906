"""Agreement between ranks on when to stop: about twice a second, never by one rank alone.

A signal, `trainer.should_stop` or a clock that has run out is first known to one rank. If that rank acted at once, the
other ranks would wait for it in their next collective. So a rank only makes a note. Every few steps, all ranks exchange
their notes in one small all-reduce on the hosts (the maximum of five integers):

    rank 0   step  step  step  ⟷  step …                 [signal, stop, µs per step, rank 0's clock, steps to profile]
    rank 1   step  SIGTERM  …  ⟷  "SIGTERM": all ranks know, after the same step: they save and exit with 143

The number of steps between two exchanges follows from the slowest rank's time per step. That time is part of the notes, so
every rank computes the same number. It begins at one, at most doubles each time, and aims at `EVERY_S`. If a step takes
longer than that, an exchange follows each step. `settle` exchanges at once, at points that all ranks reach together
anyway: after a validation, at the end of an epoch.

A rank that dies closes its connections, and the exchange raises on the other ranks. No rank waits for a dead one.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from footplate.core.signals import Signals
from footplate.distributed.group import Group

EVERY_S = 0.5


class Agreement:
    """The decisions that all ranks share. A single process decides at once, without an exchange.

    Args:
        group: the ranks.
        signals: records this rank's signals, and the signal that the ranks agree on.
        wants_stop: whether this rank wants to stop (`trainer.should_stop`).

    Attributes:
        stop: all ranks stop as soon as the run's limits allow.
        interrupted: some rank has received a signal.
        now_s: rank 0's clock (monotonic seconds) at the last exchange: the same number on every rank.
        profile_steps: the number of steps of the profile that this rank was asked for; 0 without one. Any thread sets it.
        on_profile: called on every rank, after the same step, with the number of steps of the profile.
    """

    def __init__(self, group: Group, signals: Signals, wants_stop: Callable[[], bool]) -> None:
        self._group = group
        self._signals = signals
        self._wants_stop = wants_stop
        self._stop = False
        self._signal = 0
        self._now_s = time.monotonic()
        self._every = self._left = 1
        self._since = time.monotonic()
        self.profile_steps = 0
        self.on_profile: Callable[[int], None] = lambda steps: None

    @property
    def stop(self) -> bool:
        return self._stop if self._group.is_distributed else self._wants_stop()

    @property
    def interrupted(self) -> bool:
        return bool(self._signal) if self._group.is_distributed else self._signals.received is not None

    @property
    def now_s(self) -> float:
        return self._now_s if self._group.is_distributed else time.monotonic()

    def begin(self) -> None:
        """Begin a sequence of steps (training, a validation) whose pace isn't known yet. All ranks call it."""
        self._every = self._left = 1
        self._since = time.monotonic()

    def step(self) -> None:
        """Count a step that every rank takes, and exchange notes when they are due."""
        self._left -= 1
        if self._left <= 0:
            self._exchange(self._every)

    def settle(self) -> None:
        """Exchange notes now. All ranks call it."""
        if self._group.is_distributed:
            self._exchange(0)

    def _exchange(self, steps: int) -> None:
        began = time.monotonic()
        per_step_us = int((began - self._since) * 1e6 / steps) if steps else 0
        received = self._signals.received
        clock_us = int(began * 1e6) if self._group.world.rank == 0 else -(1 << 62)
        stop = int(self._wants_stop())
        notes = [0 if received is None else int(received), stop, per_step_us, clock_us, self.profile_steps]
        self._signal, stop, per_step_us, clock_us, profile_steps = self._group.maximum(notes)
        self._stop, self._now_s = bool(stop), clock_us / 1e6
        if profile_steps:
            self.profile_steps = 0
            self.on_profile(profile_steps)
        if self._signal:
            self._signals.agree(signal.Signals(self._signal))
        if steps:
            self._every = steps_between(per_step_us / 1e6, self._every)
        self._left = self._every
        self._since = time.monotonic()


def steps_between(step_s: float, before: int) -> int:
    """The number of steps until the next exchange: those of `EVERY_S`, at most twice as many as before, at least one."""
    return max(1, min(2 * before, int(EVERY_S / max(step_s, 1e-6))))
