"""How long a launch waits for machines that come and go. The clock and the machines obey the test."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from footplate.core.errors import LaunchError
from footplate.launch.attempt_monitor import AwakeClock, Timeouts
from footplate.launch.hang_files import HangFiles
from footplate.launch.policy import Restarts
from footplate.launch.supervisor import FEWEST_S, GATHER_S, REJOIN_S, Supervisor

ALL = (0, 1, 2)


class Machines:
    """A worker group whose time passes while it waits.

    Args:
        present: the slots that are there at a second.
    """

    def __init__(self, present: Callable[[float], tuple[int, ...]]) -> None:
        self.now = 0.0
        self._present = present

    def present(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        return self._present(self.now)

    def leaving(self) -> bool:
        return False

    def wait(self, timeout_s: float) -> list:
        self.now += timeout_s
        return []


def supervisor_of(group: Machines) -> Supervisor:
    supervisor = Supervisor(
        group,  # pyright: ignore[reportArgumentType]  # it has what the supervisor needs here
        SimpleNamespace(),  # pyright: ignore[reportArgumentType]
        SimpleNamespace(received=deque()),  # pyright: ignore[reportArgumentType]
        Restarts(),
        "launch",
        Timeouts(),
        HangFiles(None),
    )
    supervisor._clock = AwakeClock(lambda: group.now)
    return supervisor


@pytest.mark.parametrize(("attempt", "waits_s"), [(0, GATHER_S), (1, REJOIN_S)])
def test_it_waits_a_little_for_machines_that_it_can_do_without(attempt, waits_s):
    group = Machines(lambda now: (0, 1))
    assert supervisor_of(group)._gather(ALL, attempt) == (0, 1)
    assert waits_s <= group.now <= waits_s + 1


def test_it_begins_as_soon_as_all_are_there():
    group = Machines(lambda now: ALL if now >= 2 else (0, 1))
    assert supervisor_of(group)._gather(ALL, 0) == ALL
    assert group.now <= 3


def test_it_waits_long_for_machines_that_it_needs():
    group = Machines(lambda now: (0, 2) if now >= FEWEST_S - 1 else ())
    assert supervisor_of(group)._gather(ALL, 1) == (0, 2)


def test_it_gives_up_if_there_are_never_enough():
    group = Machines(lambda now: ())
    with pytest.raises(LaunchError, match="launch: after 570 s, too few machines are there"):
        supervisor_of(group)._gather(ALL, 1)
    assert group.now <= FEWEST_S + 1


@pytest.mark.parametrize(
    ("used", "present", "asked"),
    [((0, 1), ALL, True), (ALL, ALL, False), (ALL, (0, 1), False), (ALL, (), False)],
    ids=["one more", "all are used", "one is silent for a moment", "too few are heard"],
)
def test_after_a_checkpoint_it_ends_the_attempt_only_for_more_machines(used, present, asked):
    supervisor = supervisor_of(Machines(lambda now: present))
    supervisor._slots, supervisor._used_slots = ALL, used
    asks = []
    supervisor._regroup(SimpleNamespace(ask_to_end=lambda: asks.append(True)))  # pyright: ignore[reportArgumentType]
    assert bool(asks) == asked
