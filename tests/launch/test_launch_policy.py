"""The pure parts: the decision after a failure, the choice of the cause, and time that counts only while awake."""

from __future__ import annotations

import errno
from dataclasses import replace
from itertools import pairwise

import pytest
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

from footplate.compat.horovod.errors import PeerLostError
from footplate.launch.attempt_monitor import TICK_S, AwakeClock
from footplate.launch.failure import Failure, cause_of, may_pass, of_exception, of_exit
from footplate.launch.policy import SAME_FAILURE, Again, GiveUp, Restarts, State, decide

SIZE = 4
policies = st.builds(
    Restarts,
    max_restarts=st.integers(0, 5),
    max_host_restarts=st.integers(0, 5),
    max_delay_s=st.floats(0, 100),
    min_world_size=st.none() | st.integers(1, SIZE),
    drop_after=st.integers(1, 3),
)
kinds = st.sampled_from(["exception", "exit", "signal", "frozen"])
texts = st.sampled_from(["raised KeyError: 'a'", "raised KeyError: 'b'"])
happenings = st.lists(
    st.tuples(kinds | st.just("host"), st.integers(0, SIZE - 1), st.booleans(), texts, st.booleans()), max_size=60
)


def failure(
    kind="exception", slot: int | None = 0, at=0.0, mistake=False, text="failed", passing: bool = False
) -> Failure:
    return Failure(kind, text, at, slot, slot, mistake=mistake, passing=passing)


def follow(restarts: Restarts, happened) -> list[tuple[State, Failure, bool, Again | GiveUp]]:
    """Decide about one failure after another, each of a rank that exists."""
    state, decisions = State(slots=tuple(range(SIZE))), []
    for kind, which, progressed, *what in happened:
        text, passing = what or ("failed", False)
        failed = failure(kind, state.slots[which % len(state.slots)], text=text, passing=passing)
        decision = decide(restarts, state, failed, progressed)
        decisions.append((state, failed, progressed, decision))
        if isinstance(decision, GiveUp):
            break
        state = decision.state
    return decisions


@given(policies, happenings)
def test_it_ends(restarts, happened):
    assert len(follow(restarts, happened)) <= restarts.max_restarts + restarts.max_host_restarts + SIZE + 1


@given(policies, happenings)
def test_ranks_are_given_up_one_at_a_time_and_never_too_many(restarts, happened):
    for before, failed, _, decision in follow(restarts, happened):
        if isinstance(decision, Again):
            gone = set(before.slots) - set(decision.state.slots)
            assert gone == (set() if decision.dropped is None else {decision.dropped})
            assert decision.dropped in (None, failed.slot)
            assert len(decision.state.slots) >= (restarts.min_world_size or SIZE)


@given(policies, happenings)
def test_a_rank_that_fails_after_progress_is_kept(restarts, happened):
    for _, failed, progressed, decision in follow(restarts, happened):
        if isinstance(decision, Again) and progressed and failed.kind != "host":
            assert decision.dropped is None or restarts.drop_after == 0


@given(policies, happenings)
def test_only_failures_of_the_host_use_its_budget(restarts, happened):
    for before, failed, _, decision in follow(restarts, happened):
        if isinstance(decision, Again):
            used = (decision.state.restarts - before.restarts, decision.state.host_restarts - before.host_restarts)
            assert used == ((0, 0) if decision.dropped is not None else (0, 1) if failed.kind == "host" else (1, 0))


@given(policies, happenings)
def test_the_first_restart_after_progress_comes_at_once_and_none_later_than_allowed(restarts, happened):
    for _, _, progressed, decision in follow(restarts, happened):
        if isinstance(decision, Again):
            assert 0 <= decision.delay_s <= restarts.max_delay_s
            assert decision.delay_s == 0 or not progressed


def same_exception(before: Failure, now: Failure) -> bool:
    """Return True if both are exceptions of the code, with the same text."""
    own = all(failed.kind == "exception" and not failed.passing for failed in (before, now))
    return own and before.text == now.text


@given(policies, happenings)
def test_an_exception_that_comes_again_without_progress_is_the_codes_fault_or_that_of_a_slot_to_spare(
    restarts, happened
):
    for (_, before, _, _), (state, now, progressed, decision) in pairwise(follow(restarts, happened)):
        if same_exception(before, now) and not progressed:
            to_spare = restarts.min_world_size is not None and len(state.slots) > restarts.min_world_size
            assert decision == GiveUp(SAME_FAILURE) or (to_spare and now.slot == before.slot)


@given(policies, happenings)
def test_nothing_but_the_same_exception_again_and_a_budget_that_is_used_up_ends_it(restarts, happened):
    decisions = follow(restarts, happened)
    for (_, before, _, _), (state, now, progressed, decision) in pairwise(decisions):
        if isinstance(decision, GiveUp):
            again = same_exception(before, now) and not progressed
            host = now.kind == "host"
            used = state.host_restarts if host else state.restarts
            assert again or used == (restarts.max_host_restarts if host else restarts.max_restarts)


def test_an_exception_of_the_code_is_tried_again_once_unless_the_work_has_advanced():
    wrong = ("exception", 0, False)
    assert len(follow(Restarts(), [wrong] * 9)) == 2
    assert follow(Restarts(), [wrong] * 9)[-1][-1] == GiveUp(SAME_FAILURE)
    advanced = ("exception", 0, True)
    assert len(follow(Restarts(), [advanced] * 9)) == 4
    assert follow(Restarts(), [advanced, wrong])[-1][-1] == GiveUp(SAME_FAILURE)
    assert len(follow(Restarts(), [wrong, ("signal", 0, False)] * 9)) == 4
    assert len(follow(Restarts(), [("exception", 0, False, "raised OSError", True)] * 9)) == 4


def test_an_exception_of_one_slot_costs_that_slot_first_and_ends_it_when_another_raises_the_same():
    restarts = Restarts(min_world_size=1, drop_after=2)
    decisions = follow(restarts, [("exception", 1, False)] * 9)  # of the worker that is rank 1 in that attempt
    assert [failed.slot for _, failed, _, _ in decisions] == [1, 1, 2]
    assert decisions[1][-1].dropped == 1
    assert decisions[2][-1] == GiveUp(SAME_FAILURE)
    assert len(follow(restarts, [("exception", 0, False), ("exception", 1, False)])) == 2


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (OSError(errno.ENOSPC, "no space left on device"), True),
        (torch.distributed.DistStoreError("timed out"), True),
        (RuntimeError("[/build/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [192.0.2.2]:694."), True),
        (PeerLostError("rank 1 has gone"), True),
        (RuntimeError("[rows/gloo] have another size"), False),
        (FileNotFoundError(), False),
        (PermissionError(), False),
        (ValueError(), False),
        (RuntimeError("size mismatch"), False),
    ],
)
def test_what_is_outside_of_the_code_may_have_changed_the_next_time(error, passes):
    assert may_pass(error) is passes


def test_pauses_double():
    decisions = follow(Restarts(max_restarts=6, max_delay_s=5), [("signal", 0, False)] * 6)
    assert [decision.delay_s for *_, decision in decisions] == [0, 1, 2, 4, 5, 5]


def test_pauses_begin_anew_with_progress():
    happened = [("signal", 0, False)] * 3 + [("signal", 0, True)] + [("signal", 0, False)]
    assert [decision.delay_s for *_, decision in follow(Restarts(max_restarts=9), happened)] == [0, 1, 2, 0, 1]


def test_a_mistake_is_never_tried_again():
    assert decide(Restarts(max_restarts=9), State((0, 1)), failure(mistake=True), True) == GiveUp("")


def test_a_rank_is_given_up_only_for_failures_of_its_own_in_a_row():
    restarts = Restarts(max_restarts=9, min_world_size=1, drop_after=2)
    decisions = follow(
        restarts, [("signal", 1, False), ("signal", 0, False), ("signal", 1, False), ("signal", 1, False)]
    )
    assert [decision.dropped for *_, decision in decisions] == [None, None, None, 1]


def test_a_rank_that_cannot_be_started_is_given_up_at_once_but_not_for_what_befell_all():
    restarts = Restarts(min_world_size=1)
    assert decide(restarts, State((0, 1)), failure("host", 1), False).state.slots == (0,)
    assert decide(restarts, State((0, 1)), failure("host", None), False).state.slots == (0, 1)


@given(st.lists(st.builds(failure, kinds, st.integers(0, 3), st.floats(0, 10), st.booleans()), min_size=1))
def test_the_cause_does_not_depend_on_the_order_in_which_failures_are_heard_of(failures):
    cause = cause_of(failures)
    again = cause_of(reversed(failures))
    assert (cause.mistake, cause.since) == (again.mistake, again.since)


def test_the_cause_is_the_earliest_with_time_for_a_death_to_be_noticed():
    raised, killed = failure("exception", 0, at=10.0), failure("signal", 1, at=10.1)
    assert cause_of([raised, killed]) is killed
    aborted = failure("signal", 1, at=10.5)  # as NCCL does to a peer
    assert cause_of([raised, aborted]) is raised


def test_a_lost_machine_is_the_cause_of_what_its_peers_raised_long_before_anybody_missed_it():
    raised = failure("exception", 0, at=10.0)
    lost = replace(failure("host", 1, at=40.0), lost=True)
    assert cause_of([raised, lost]) is lost
    told = failure("host", 1, at=12.0)  # ended by a signal from outside, and seen to end
    assert cause_of([raised, told]) is raised


def test_a_mistake_is_the_cause_whenever_it_came():
    mistake = failure(at=11.0, mistake=True)
    assert cause_of([failure("signal", 1, at=10.0), mistake]) is mistake


def test_ends_and_exceptions_are_put_into_words():
    assert of_exit(-11) == ("signal", "was killed by SIGSEGV")
    assert of_exit(-35) == ("signal", "was killed by signal 35")
    assert of_exit(2) == ("exit", "ended with exit code 2")
    assert of_exception(KeyError()) == "raised KeyError"
    assert len(of_exception(ValueError("x" * 9999))) < 600


@given(st.lists(st.floats(0, 1000), max_size=20))
def test_time_asleep_is_not_counted(steps):
    real = iter([0.0, *(sum(steps[: i + 1]) for i in range(len(steps)))])
    clock = AwakeClock(lambda: next(real))
    for _ in steps:
        before = clock.now
        assert 0 <= clock.look() - before <= TICK_S + 1e-9
