"""Vertex AI's description of an end, and its meaning for the job."""

from __future__ import annotations

import pytest

from footplate.jobs.backends.vertex.outcome import failure, outcome


def nothing(role: str, index: int) -> str:
    """An empty message of a replica."""
    return ""


EXITED = "The replica {} exited with a non-zero status of {}. Termination reason: Error."
NO_MEMORY = "The replica workerpool0-0 ran {} and exited with a non-zero status of {}."


@pytest.mark.parametrize(
    ("message", "kind", "mistake", "text"),
    [
        (EXITED.format("workerpool0-0", 2), "exit", True, "master 0 ended with exit code 2"),
        (EXITED.format("workerpool2-1", 139), "signal", False, "parameter server 1 was killed by SIGSEGV"),
        (NO_MEMORY.format("out of memory", 137), "signal", False, "master 0 was killed by SIGKILL: it ran out of memory"),
        (NO_MEMORY.format("out-of-memory", "9(SIGKILL)"), "signal", False,
         "master 0 was killed by SIGKILL: it ran out of memory"),
        (EXITED.format("workerpool1-0", 143), "host", False, "worker 0 was killed by SIGTERM"),
        ("Internal error occurred for the current attempt.", "host", False, None),
        ("Resources are insufficient in region: us-central1.", "host", False, None),
        ("Image gcr.io/p/nothing was not found.", "exception", True, None),
    ],
)  # fmt: skip
def test_whose_fault_a_failure_is(message, kind, mistake, text):
    outcome = failure({"state": "JOB_STATE_FAILED", "error": {"code": 3, "message": message}}, nothing)
    assert (outcome.kind, outcome.mistake, outcome.text) == (kind, mistake, text or f"Vertex AI ended it: {message}")


@pytest.mark.parametrize(
    ("state", "kind", "mistake", "text"),
    [
        ("EXPIRED", "host", False, "Vertex AI ended it: JOB_STATE_EXPIRED"),
        ("CANCELLED", "exception", True, "was cancelled at Vertex AI, and not by jobs cancel"),
        ("FAILED", "exception", False, "Vertex AI ended it: JOB_STATE_FAILED"),
    ],
)
def test_a_final_state_without_a_word_is_a_failure_too(state, kind, mistake, text):
    outcome = failure({"state": f"JOB_STATE_{state}"}, nothing)
    assert (outcome.kind, outcome.mistake, outcome.text) == (kind, mistake, text)


@pytest.mark.parametrize("error", [None, {"code": 3, "message": EXITED.format("workerpool0-0", 143)}])
def test_a_job_that_vertex_ai_ends_when_its_time_is_over_has_taken_too_long(error):
    """Vertex AI's clock and the supervisor's begin at about the same time, and either limit may pass first."""
    job = {
        "state": "JOB_STATE_FAILED" if error else "JOB_STATE_CANCELLED",
        "jobSpec": {"scheduling": {"timeout": "3600s"}},
        "startTime": "2026-01-01T00:00:00.5Z",
        **({"error": error} if error else {}),
    }
    outcome = failure({**job, "endTime": "2026-01-01T01:00:00.25Z"}, nothing)
    assert (outcome.kind, outcome.mistake, outcome.text) == (
        "exception",
        True,
        "its maximum running time of 3600 s is over",
    )
    assert "time" not in failure({**job, "endTime": "2026-01-01T00:50:00Z"}, nothing).text


def test_the_replica_that_has_failed_is_told_by_what_it_said_last():
    job = {"state": "JOB_STATE_FAILED", "error": {"code": 3, "message": EXITED.format("workerpool1-0", 1)}}
    ends = [outcome(job, role, 0, lambda role, index: f"{role} {index}: too large") for role in ("master", "worker")]
    assert ends == ["ended with its job", "ended with exit code 1: worker 0: too large"]
