"""Meaning of process exits for an attempt, on any backend."""

from __future__ import annotations

import signal

import pytest

from footplate.jobs.supervision.exit_status import GRACE_S, PEERS_S, End, Orders, Verdict, outcome

NOTHING = Orders()


def end(role: str, code: int | None, at: float = 10.0, said: str = "") -> End:
    return End(role, 0, code, "was lost with its node" if code is None else outcome(code, said), at)


def test_the_master_decides_and_the_others_may_finish():
    verdict = Verdict()
    assert verdict.ended(end("worker", 0)) == NOTHING
    assert verdict.ended(end("evaluator", 1)) == NOTHING
    assert verdict.ended(end("master", 0)) == Orders(("parameter_server",), GRACE_S)
    assert verdict.ended(end("parameter_server", -signal.SIGTERM)) == NOTHING
    assert (verdict.succeeded, verdict.failure) == (True, None)


@pytest.mark.parametrize("role", ["master", "worker", "parameter_server"])
def test_who_works_or_serves_and_fails_ends_the_attempt(role: str):
    verdict = Verdict()
    assert verdict.ended(end(role, 7)) == Orders(kill_within_s=PEERS_S)
    assert verdict.ended(end("master", 0)) == Orders(kill_within_s=PEERS_S)  # of no use any more
    assert not verdict.succeeded
    assert verdict.failure is not None
    assert verdict.failure.text == f"{role.replace('_', ' ')} 0 ended with exit code 7"
    assert (verdict.failure.kind, verdict.failure.code) == ("exit", 7)


def test_a_mistake_ends_all_at_once_and_is_known_as_one():
    verdict = Verdict()
    assert verdict.ended(end("worker", 2)) == Orders(kill_within_s=0.0)
    assert verdict.failure is not None
    assert verdict.failure.mistake


@pytest.mark.parametrize("code", [143, -signal.SIGTERM])
def test_who_is_told_to_end_by_the_machine_is_not_to_blame(code: int):
    verdict = Verdict()
    verdict.ended(end("master", code))
    assert verdict.failure is not None
    assert verdict.failure.kind == "host"


def test_what_peers_raise_of_a_lost_machine_is_not_the_cause():
    verdict = Verdict()
    verdict.ended(end("master", 1, at=12.0, said="RuntimeError: Connection closed by peer"))
    verdict.ended(end("worker", None, at=11.5))  # noticed later, but last heard before
    assert verdict.failure is not None
    assert (verdict.failure.kind, verdict.failure.text) == ("host", "worker 0 was lost with its node")


def test_an_exception_or_a_mistake_is_known_by_what_was_said_last():
    assert outcome(2, "task.py: error: no --lr") == "ended with exit code 2: task.py: error: no --lr"
    assert outcome(1, "ValueError: too large") == "ended with exit code 1: ValueError: too large"
    assert outcome(3, "ValueError: too large") == "ended with exit code 3"
    assert outcome(-9, "") == "was killed by SIGKILL"
