"""The monitor of an attempt decides by a clock, and by what a worker group tells it. Here both obey the test."""

from __future__ import annotations

import signal
from itertools import count

import pytest

from footplate.core.stacks.snapshot import Process
from footplate.launch.attempt_monitor import TICK_S, AttemptMonitor, AwakeClock, Timeouts
from footplate.launch.hang_watch import COLLECT_S
from footplate.launch.worker_group import Alive, Attempt, Ended, Report, Reported, Stacks

TIMEOUT_S = 5.0


class Machines:
    """A worker group with one rank on each machine. A machine that is silent sends nothing from second 0 on."""

    def __init__(self, silent: set[int]) -> None:
        self.silent = silent
        self.now = 0.0
        self.asked = False
        self.killed_at: dict[int, float] = {}

    def ask_stacks(self, limit_s: float, native: bool) -> None:
        self.asked = True

    def silence_s(self, rank: int) -> float:
        return self.now if rank in self.silent else 0.0

    def kill(self, rank: int) -> None:
        self.killed_at[rank] = self.now


def monitor_of(group: Machines) -> AttemptMonitor:
    """A monitor of two ranks that have made progress."""
    monitor = AttemptMonitor(
        group,  # pyright: ignore[reportArgumentType]  # it has what the monitor needs here
        Attempt(0, slots=(0, 1)),
        AwakeClock(lambda: group.now),
        Timeouts(heartbeat_timeout_s=TIMEOUT_S),
    )
    for rank in (0, 1):
        monitor.take(Alive(rank, progressed=True))
    return monitor


def killed_at(silent_machines: set[int], silent_ranks: set[int], answering: set[int]) -> dict[int, float]:
    """Run two ranks until one is killed; return when that was. The ranks in `answering` answer with their stacks."""
    group = Machines(silent_machines)
    monitor = monitor_of(group)
    for tick in count(1):
        group.now = tick * TICK_S
        for rank in {0, 1} - silent_ranks:
            monitor.take(Alive(rank))
        if group.asked:
            group.asked = False
            for rank in answering:
                monitor.take(Stacks(rank, Process(pid=rank + 1, rank=rank, world_size=2)))
        monitor.look()
        if group.killed_at:
            return group.killed_at
        assert group.now < 100
    raise AssertionError


def test_nobody_waits_for_the_stacks_of_a_machine_that_is_silent():
    killed = killed_at(silent_machines={1}, silent_ranks={1}, answering={0})
    # Rank 0 waits for rank 1, and nothing ends that.
    assert list(killed) == [1, 0]
    assert TIMEOUT_S < killed[1] == killed[0] <= TIMEOUT_S + 2 * TICK_S


def test_a_frozen_rank_on_a_machine_that_lives_has_time_to_answer():
    killed = killed_at(silent_machines=set(), silent_ranks={1}, answering={0})
    assert list(killed) == [1]
    assert killed[1] >= TIMEOUT_S + COLLECT_S
    killed = killed_at(silent_machines=set(), silent_ranks={1}, answering={0, 1})
    assert killed[1] <= TIMEOUT_S + 2 * TICK_S


@pytest.mark.parametrize(("silent", "grace_s"), [(True, 0.0), (False, Timeouts.peers_grace_s)])
def test_ranks_have_time_to_fail_by_themselves_if_their_connections_to_a_lost_machine_have_ended(silent, grace_s):
    group = Machines(set())
    monitor = monitor_of(group)
    monitor.take(Ended(1, None, 0.0, "was lost", silent=silent))
    while not group.killed_at:
        monitor.take(Alive(0))
        monitor.look()
        group.now += TICK_S
        assert group.now < 100
    assert list(group.killed_at) == [0]
    assert grace_s <= group.killed_at[0] <= grace_s + TICK_S


STOPPED, RETURNED, LEFT = Report("stopped", 0.0, 143), Report("returned", 0.0), Report("left", 0.0)
LOST_A_PEER = Report("raised", 0.0, 1, "raised RuntimeError: Connection closed by peer", passing=True)
MISTAKE = Report("raised", 0.0, 1, "raised KeyError: 'a'")


@pytest.mark.parametrize(
    ("reports", "as_asked"),
    [
        ((STOPPED, STOPPED), True),
        ((STOPPED, RETURNED), True),
        ((STOPPED, LOST_A_PEER), True),
        ((STOPPED, MISTAKE), False),
        ((RETURNED, RETURNED), False),
        ((LEFT, LEFT), False),
    ],
)
def test_ranks_that_have_finished_or_failed_did_not_end_because_they_were_asked_to(reports, as_asked):
    group = Machines(set())
    monitor = monitor_of(group)
    for rank, report in enumerate(reports):
        monitor.take(Reported(rank, report, lambda: None, -1))
        monitor.take(Ended(rank, report.code, 0.0))
    assert monitor.over
    assert monitor.ended_as_asked == as_asked


def test_ranks_that_sigterm_has_killed_ended_because_they_were_asked_to():
    monitor = monitor_of(Machines(set()))
    for rank in (0, 1):
        monitor.take(Ended(rank, -signal.SIGTERM, 0.0))
    assert monitor.ended_as_asked
