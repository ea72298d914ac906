"""Allowed transitions between states."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from footplate.jobs.states import FINAL, FOLLOWERS, SUPERVISED, State, may_follow

states = st.sampled_from(list(State))


def reachable(start: State) -> set[State]:
    reached, left = {start}, [start]
    while left:
        new = FOLLOWERS[left.pop()] - reached
        reached |= new
        left += new
    return reached


def test_every_state_is_reached_from_the_queue_and_every_one_leads_to_an_end():
    assert reachable(State.QUEUED) == set(State)
    assert all(reachable(state) & set(FINAL) for state in State)


@given(states, states)
def test_what_has_ended_changes_only_by_being_resubmitted(source: State, target: State):
    if source in FINAL and may_follow(source, target):
        assert target == State.QUEUED
        assert source != State.SUCCEEDED


@given(states, states)
def test_nothing_succeeds_or_fails_that_was_being_cancelled_or_had_no_processes(source: State, target: State):
    if target in (State.SUCCEEDED, State.FAILED) and may_follow(source, target):
        assert source in SUPERVISED
        assert source != State.CANCELLING
