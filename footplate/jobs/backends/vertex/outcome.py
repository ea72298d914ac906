"""Judge the end of a CustomJob: is the program to blame, and does a retry help?

Vertex AI reports a state, a gRPC code and a sentence. This module reads them as its documentation describes them:

    The replica workerpool0-0 exited with a non-zero status of 1. Termination reason: Error.        the program
    The replica workerpool0-0 ran out of memory and exited with a non-zero status of 137.           the program
    Resources are insufficient in region: us-central1. Try a different region …                     the machine
    Internal error occurred for the current attempt.                                                the machine

It reports the exit code of one replica at most. The code means what it means everywhere (`supervision/exit_status.py`). A
signal is its number + 128 or, in Google's own images, its number. If a job ends when its time-out is over, the time-out is
the cause, whatever the sentence says.
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
"""The roles of the worker pools, by number."""

_EXIT = re.compile(r"replica (workerpool[0-3]-\d+)\b.*?exited with a non-zero status of (-?\d+)", re.DOTALL)
_NO_MEMORY = re.compile(r"out[ -]of[ -]memory", re.IGNORECASE)
_LOST = re.compile(r"internal error|resources are insufficient|stockout|preempt|maintenance", re.IGNORECASE)
# The codes of gRPC for: exhausted, aborted, internal, unavailable.
_PASSING = {8, 10, 13, 14}
_SIGNALS = {6, 9, 11, 15}
# A job may seem to end this much before its time-out.
_CLOCK_S = 1.0

LastOutput = Callable[[str, int], str]
"""Returns the last line of a replica's output, by role and index."""


def replica(task: str) -> tuple[str, int] | None:
    """Convert Vertex AI's name of a task to role and index.

    >>> replica("workerpool2-1"), replica("service")
    (('parameter_server', 1), None)
    """
    match = re.fullmatch(r"workerpool([0-3])-(\d+)", task)
    return (ROLES[int(match[1])], int(match[2])) if match else None


def outcome(job: Mapping[str, Any], role: str, index: int, last_output: LastOutput) -> str:
    """Describe the end of a replica, as far as Vertex AI reports it.

    Args:
        job: the ended CustomJob.
        role: the replica's role.
        index: the replica's index.
        last_output: returns the last line of a replica's output.
    """
    if job.get("state") == "JOB_STATE_SUCCEEDED" and role == "master":
        return exit_status.outcome(0, "")
    end = _end(job, last_output)
    return end.outcome if end and (end.role, end.index) == (role, index) else "ended with its job"


def failure(job: Mapping[str, Any], last_output: LastOutput) -> Failure:
    """The failure of an attempt.

    Args:
        job: the ended CustomJob, which didn't succeed.
        last_output: returns the last line of a replica's output.
    """
    state, message, now = str(job.get("state", "")), _message(job), time.monotonic()
    longest_s = _seconds(job.get("jobSpec", {}).get("scheduling", {}).get("timeout"))
    if _ran_s(job) > longest_s - _CLOCK_S:
        return Failure("exception", f"its maximum running time of {longest_s:g} s is over", now, mistake=True)
    if (end := _end(job, last_output)) is not None:
        return exit_status.failure_of(end)
    if state == "JOB_STATE_CANCELLED" and not message:
        return Failure("exception", "was cancelled at Vertex AI, and not by jobs cancel", now, mistake=True)
    text = f"Vertex AI ended it: {message or state}"
    if _LOST.search(message) or _error(job).get("code") in _PASSING or state == "JOB_STATE_EXPIRED":
        return Failure("host", text, now)
    return Failure("exception", text, now, mistake=bool(message))


def _end(job: Mapping[str, Any], last_output: LastOutput) -> End | None:
    """The end of the replica that Vertex AI reports; None if it reports none."""
    message = _message(job)
    match = _EXIT.search(message)
    identity = replica(match[1]) if match else None
    if match is None or identity is None:
        return None
    code = int(match[2])
    if code in _SIGNALS or 128 < code < 160:
        code = -(code % 128)
    if _NO_MEMORY.search(message):
        text = f"{exit_status.outcome(code, '')}: it ran out of memory"
    else:
        text = exit_status.outcome(code, last_output(*identity))
    return End(*identity, code, text, time.monotonic())


def _error(job: Mapping[str, Any]) -> Mapping[str, Any]:
    return job.get("error") or {}


def _message(job: Mapping[str, Any]) -> str:
    return " ".join(str(_error(job).get("message", "")).split())


def _ran_s(job: Mapping[str, Any]) -> float:
    """The running time; negative if it isn't reported."""
    began, ended = to_time(job.get("startTime", "")), to_time(job.get("endTime", ""))
    return (ended - began) / SECOND if began and ended else -1.0


def _seconds(timeout: str | None) -> float:
    return float(timeout.removesuffix("s")) if timeout else float("inf")
