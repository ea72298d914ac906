"""Agreement: a signal or a stop on one rank counts for all ranks, from the same step on."""

from __future__ import annotations

import os
import signal
import time

from hypothesis import given
from hypothesis import strategies as st
from models import ranks

from footplate.core.signals import Signals
from footplate.distributed.agreement import EVERY_S, Agreement, steps_between
from footplate.distributed.group import ALONE, Group, join
from footplate.distributed.world import World


@given(st.floats(0, 1e4), st.integers(1, 1 << 40))
def test_the_pace_at_most_doubles_and_never_stands_still(step_s, before):
    steps = steps_between(step_s, before)
    assert 1 <= steps <= 2 * before
    assert steps == 1 or steps * step_s <= EVERY_S


def test_a_single_process_decides_at_once():
    wants = []
    signals = Signals()
    agreement = Agreement(ALONE, signals, lambda: bool(wants))
    assert not agreement.stop
    assert not agreement.interrupted
    wants.append(True)
    signals.received = signal.SIGTERM
    assert agreement.stop
    assert agreement.interrupted
    before = agreement.now_s
    time.sleep(0.002)
    assert agreement.now_s > before


def group() -> Group:
    import torch

    return join(World.from_environ(), "gloo", torch.device("cpu"))


def unequal_steps(sleeps_s: list[float], stop_at: int) -> tuple[int, float, bool]:
    """Take steps of unequal length until all agree to stop; rank 1 wants to at some step."""
    ranks_ = group()
    rank, step = ranks_.world.rank, 0
    agreement = Agreement(ranks_, Signals(), lambda: rank == 1 and step >= stop_at)
    agreement.begin()
    while not agreement.stop:
        time.sleep(sleeps_s[rank])
        step += 1
        agreement.step()
    return step, agreement.now_s, agreement.interrupted


def test_ranks_of_unequal_speed_stop_after_the_same_step_with_the_same_clock():
    first, second = ranks.run(lambda: unequal_steps([0.001, 0.02], 10), 2)
    assert first == second
    assert 10 <= first[0] < 64
    assert not first[2]


def test_a_rank_that_takes_long_steps_is_heard_after_each(tmp_path):
    first, second = ranks.run(lambda: unequal_steps([0.0, 0.6], 2), 2)
    assert first == second
    assert first[0] <= 3


def signalled(number: signal.Signals) -> tuple[str, str]:
    ranks_ = group()
    with Signals() as signals:
        agreement = Agreement(ranks_, signals, lambda: False)
        if ranks_.world.rank == 1:
            os.kill(os.getpid(), number)
        agreement.settle()
        return signals.received.name, type(signals.end()).__name__


def test_a_signal_to_one_rank_is_a_signal_to_all():
    assert ranks.run(lambda: signalled(signal.SIGTERM), 2) == [("SIGTERM", "SystemExit")] * 2
    assert ranks.run(lambda: signalled(signal.SIGINT), 2) == [("SIGINT", "KeyboardInterrupt")] * 2


def alone_at_the_exchange() -> str:
    ranks_ = group()
    if ranks_.world.rank == 1:
        os._exit(3)
    began = time.monotonic()
    try:
        Agreement(ranks_, Signals(), lambda: False).settle()
    except RuntimeError:
        return "raised" if time.monotonic() - began < 100 else "late"
    return "waited in vain"


def test_the_exchange_raises_at_once_when_a_rank_has_died():
    with ranks.start(alone_at_the_exchange, 2) as started:
        import pickle

        assert pickle.loads(started._pipes[0][0].recv_bytes()) == (True, "raised")
