"""The states of a job, and the allowed transitions.

    QUEUED ──► PREPARING ──► RUNNING ──► SUCCEEDED
       ▲           ▲ │          │ │
       │           └─┼──────────┘ └────► FAILED
       │             │ a new attempt
       │             ▼
       │         CANCELLING ──► CANCELLED
       └── resubmitted ── from FAILED, CANCELLED

PREPARING installs the package. RUNNING has processes. A job returns to PREPARING, with the next attempt, when a failure is
retried, and when an attempt was lost with its supervisor. A queued job is CANCELLED at once. A job with processes is
CANCELLING until all of them have ended, however they end.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """The state of a job, in AI Platform's words.

    Examples:
        >>> from footplate.jobs.states import FINAL, State
        >>> State.RUNNING in FINAL
        False
    """

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
"""The states in which a job has a supervisor, and holds its part of the machine."""

FINAL = (State.SUCCEEDED, State.FAILED, State.CANCELLED)
"""The states that a job leaves only if a user resubmits it."""


def may_follow(source: State, target: State) -> bool:
    """Return True if a job may go from one state to another."""
    return target in FOLLOWERS[source]
