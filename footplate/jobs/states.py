"""The states of a job, and which may follow which.

    QUEUED ──► PREPARING ──► RUNNING ──► SUCCEEDED
       ▲           ▲ │          │ │
       │           └─┼──────────┘ └────► FAILED
       │             │ a new attempt
       │             ▼
       │         CANCELLING ──► CANCELLED
       └── resubmitted ── from FAILED, CANCELLED

PREPARING installs the package; RUNNING has processes. After a failure that is tried again, and when an attempt was
lost with its supervisor, a job is PREPARING once more, with the next attempt. A job that waits is CANCELLED at once; one
that has processes is CANCELLING until they have ended, however they end.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a job is in its life; the words are AI Platform's."""

    QUEUED = "QUEUED"
    PREPARING = "PREPARING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLING = "CANCELLING"
    CANCELLED = "CANCELLED"


FOLLOWERS = {
    State.QUEUED: {State.PREPARING, State.CANCELLED},
    State.PREPARING: {State.PREPARING, State.RUNNING, State.FAILED, State.CANCELLING},
    State.RUNNING: {State.PREPARING, State.SUCCEEDED, State.FAILED, State.CANCELLING},
    State.CANCELLING: {State.CANCELLED},
    State.SUCCEEDED: set(),
    State.FAILED: {State.QUEUED},
    State.CANCELLED: {State.QUEUED},
}

SUPERVISED = (State.PREPARING, State.RUNNING, State.CANCELLING)
"""A supervisor looks after a job in these, and holds what it needs of the machine."""

FINAL = (State.SUCCEEDED, State.FAILED, State.CANCELLED)
"""Nothing happens any more by itself."""


def may_follow(source: State, target: State) -> bool:
    """Whether a job may go from one state to another."""
    return target in FOLLOWERS[source]
