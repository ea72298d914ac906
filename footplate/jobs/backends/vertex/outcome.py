"""What an end at Vertex AI means for the job: whose fault it was, and whether to try again.

Vertex AI says it in a state, a code of gRPC and a sentence, which are here read as its documentation has them:

    The replica workerpool0-0 exited with a non-zero status of 1. Termination reason: Error.        the program's
    The replica workerpool0-0 ran out of memory and exited with a non-zero status of 137.           the program's
    Resources are insufficient in region: us-central1. Try a different region …                     the machine's
    Internal error occurred for the current attempt.                                                the machine's

It tells of one replica's exit code at most, which means what it does everywhere (`supervision/exit_status.py`). A signal is
its number + 128, or, in Google's own images, its number. A job that ends when its time-out is over was ended by that,
whatever the sentence.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from footplate.jobs.backends.vertex.timestamps import SECOND, to_time
from footplate.jobs.supervision import exit_status
from footplate.jobs.supervision.exit_status import End
from footplate.launch.failure import Failure

RUNNING = ("JOB_STATE_RUNNING", "JOB_STATE_UPDATING")
FINAL = (
    "JOB_STATE_SUCCEEDED", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED",
    "JOB_STATE_PARTIALLY_SUCCEEDED",
)  # fmt: skip

ROLES = ("master", "worker", "parameter_server", "evaluator")
"""What the worker pools are, by their number."""

_EXIT = re.compile(r"replica (workerpool[0-3]-\d+)\b.*?exited with a non-zero status of (-?\d+)", re.DOTALL)
_NO_MEMORY = re.compile(r"out[ -]of[ -]memory", re.IGNORECASE)
_LOST = re.compile(r"internal error|resources are insufficient|stockout|preempt|maintenance", re.IGNORECASE)
_PASSING = {8, 10, 13, 14}  # exhausted, aborted, internal, unavailable
_SIGNALS = {6, 9, 11, 15}
_CLOCK_S = 1.0  # by which an end may seem to come before its time

Said = Callable[[str, int], str]
"""What a replica, of this role and index, has said last."""


def replica(task: str) -> tuple[str, int] | None:
    """Role and index of what Vertex AI calls a task.

    >>> replica("workerpool2-1"), replica("service")
    (('parameter_server', 1), None)
    """
    found = re.fullmatch(r"workerpool([0-3])-(\d+)", task)
    return (ROLES[int(found[1])], int(found[2])) if found else None


def outcome(job: Mapping[str, Any], role: str, index: int, said: Said) -> str:
    """How one replica has ended, as far as Vertex AI says it.

    Args:
        job: the CustomJob at its end.
        role: the replica's.
        index: the replica's.
        said: what it said last.
    """
    if job.get("state") == "JOB_STATE_SUCCEEDED" and role == "master":
        return exit_status.outcome(0, "")
    end = _end(job, said)
    return end.outcome if end and (end.role, end.index) == (role, index) else "ended with its job"


def failure(job: Mapping[str, Any], said: Said) -> Failure:
    """Why an attempt has failed.

    Args:
        job: the CustomJob at its end, when that is no success.
        said: what a replica said last.
    """
    state, message, now = str(job.get("state", "")), _message(job), time.monotonic()
    longest_s = _seconds(job.get("jobSpec", {}).get("scheduling", {}).get("timeout"))
    if _ran_s(job) > longest_s - _CLOCK_S:
        return Failure("exception", f"its maximum running time of {longest_s:g} s is over", now, mistake=True)
    if (end := _end(job, said)) is not None:
        return exit_status.failure_of(end)
    if state == "JOB_STATE_CANCELLED" and not message:
        return Failure("exception", "was cancelled at Vertex AI, and not by jobs cancel", now, mistake=True)
    text = f"Vertex AI ended it: {message or state}"
    if _LOST.search(message) or _error(job).get("code") in _PASSING or state == "JOB_STATE_EXPIRED":
        return Failure("host", text, now)
    return Failure("exception", text, now, mistake=bool(message))


def _end(job: Mapping[str, Any], said: Said) -> End | None:
    """The end of the one replica of which it tells, if it does."""
    message = _message(job)
    found = _EXIT.search(message)
    who = replica(found[1]) if found else None
    if found is None or who is None:
        return None
    code = int(found[2])
    if code in _SIGNALS or 128 < code < 160:
        code = -(code % 128)
    if _NO_MEMORY.search(message):
        text = f"{exit_status.outcome(code, '')}: it ran out of memory"
    else:
        text = exit_status.outcome(code, said(*who))
    return End(*who, code, text, time.monotonic())


def _error(job: Mapping[str, Any]) -> Mapping[str, Any]:
    return job.get("error") or {}


def _message(job: Mapping[str, Any]) -> str:
    return " ".join(str(_error(job).get("message", "")).split())


def _ran_s(job: Mapping[str, Any]) -> float:
    """How long it ran; negative if that isn't said."""
    began, ended = to_time(job.get("startTime", "")), to_time(job.get("endTime", ""))
    return (ended - began) / SECOND if began and ended else -1.0


def _seconds(timeout: str | None) -> float:
    return float(timeout.removesuffix("s")) if timeout else float("inf")
