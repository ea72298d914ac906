"""An attempt at Vertex AI against a server on loopback, from its beginning to its end."""

from __future__ import annotations

import time

from footplate.jobs.backends.vertex import attempt, logs
from jobs.backends.vertex_attempt import PATIENCE_S, begin, until
from jobs.backends.vertex_server import Cloud, Trouble, error


def succeed(cloud: Cloud) -> None:
    cloud.runs[0].resource["state"] = "JOB_STATE_SUCCEEDED"


def test_it_is_created_once_heard_and_over_when_its_state_is_final(cloud, tmp_path):
    attempt = begin(tmp_path)
    until(attempt, lambda: cloud.runs)
    until(attempt, lambda: cloud.asked("GET", r"customJobs/\d+$"))
    cloud.say(cloud.runs[0], "workerpool0-0", "step 1")
    cloud.say(cloud.runs[0], "workerpool1-0", "", textPayload="from\nthe worker\n")
    cloud.say(cloud.runs[0], "service", "provisioned")
    succeed(cloud)
    ended = []
    deadline = time.monotonic() + PATIENCE_S
    while not attempt.over:
        ended += attempt.wait(0.05)
        assert time.monotonic() < deadline
    assert attempt.succeeded
    assert attempt.failure is None
    assert [(who.role, who.outcome) for who in ended] == [
        ("master", "ended with exit code 0"), ("worker", "ended with its job")
    ]  # fmt: skip
    assert attempt.wait(0.0) == []
    assert (tmp_path / "master-0.log").read_text() == "step 1\n"
    assert (tmp_path / "worker-0.log").read_text() == "from\nthe worker\n"
    assert (tmp_path / "prepare.log").read_text() == "provisioned\n"
    assert len(cloud.runs) == 1


def test_trouble_while_it_runs_ends_nothing(cloud, tmp_path, caplog):
    attempt = begin(tmp_path)
    until(attempt, lambda: cloud.runs)
    cloud.troubles += [
        Trouble("GET", r"customJobs/\d+$", error(401, "reauthentication is needed"), times=2),
        Trouble("GET", r"customJobs/\d+$", None, times=3),
        Trouble("POST", "entries:list", error(429, "quota"), times=3),
        Trouble("POST", "entries:list", error(403, "denied"), times=1),
    ]
    cloud.say(cloud.runs[0], "workerpool0-0", "all the same")
    until(attempt, lambda: not any(trouble.times for trouble in cloud.troubles))
    succeed(cloud)
    until(attempt, lambda: attempt.over)
    assert attempt.succeeded
    assert (tmp_path / "master-0.log").read_text() == "all the same\n"
    assert "gcloud auth application-default login" in caplog.text


def test_a_job_that_somebody_deletes_is_not_tried_again(cloud, tmp_path):
    attempt = begin(tmp_path)
    until(attempt, lambda: cloud.runs)
    cloud.runs.clear()
    until(attempt, lambda: attempt.over)
    assert attempt.failure is not None
    assert attempt.failure.mistake
    assert attempt.failure.text == "its CustomJob was deleted at Vertex AI"


def test_stop_cancels_it_and_waits_for_its_end(cloud, tmp_path):
    attempt = begin(tmp_path)
    until(attempt, lambda: cloud.runs)
    cloud.troubles.append(Trouble("POST", ":cancel", error(503), times=2))
    attempt.stop(30.0)
    until(attempt, lambda: cloud.runs[0].cancelled.is_set())
    assert not attempt.over
    cloud.runs[0].resource["state"] = "JOB_STATE_CANCELLED"
    until(attempt, lambda: attempt.over)
    assert attempt.failure is None
    assert not attempt.succeeded


def test_the_reason_of_a_failure_may_come_after_the_state(cloud, tmp_path):
    attempt = begin(tmp_path)
    until(attempt, lambda: cloud.runs)
    cloud.say(cloud.runs[0], "workerpool1-0", "ValueError: too large")
    cloud.runs[0].resource["state"] = "JOB_STATE_FAILED"
    seen = len(cloud.asked("GET", r"customJobs/\d+$"))
    until(attempt, lambda: len(cloud.asked("GET", r"customJobs/\d+$")) > seen + 2)
    assert not attempt.over
    cloud.runs[0].resource["error"] = {
        "code": 3, "message": "The replica workerpool1-0 exited with a non-zero status of 1. Termination reason: Error."
    }  # fmt: skip
    until(attempt, lambda: attempt.over)
    assert attempt.failure is not None
    assert str(attempt.failure) == "worker 0 ended with exit code 1: ValueError: too large"


def test_a_disk_that_is_full_for_a_while_ends_nothing_and_loses_no_line(cloud, tmp_path):
    attempt = begin(tmp_path)
    until(attempt, lambda: cloud.runs)
    until(attempt, lambda: cloud.asked("GET", r"customJobs/\d+$"))
    (tmp_path / "vertex.json.part").mkdir()
    cloud.say(cloud.runs[0], "workerpool0-0", "meanwhile")
    asked = len(cloud.asked("POST", "entries:list"))
    until(attempt, lambda: len(cloud.asked("POST", "entries:list")) > asked + 2)
    (tmp_path / "vertex.json.part").rmdir()
    succeed(cloud)
    until(attempt, lambda: attempt.over)
    assert attempt.succeeded
    assert (tmp_path / "master-0.log").read_text() == "meanwhile\n"


def test_who_may_not_cancel_it_hears_its_end_all_the_same(cloud, tmp_path, caplog):
    attempt = begin(tmp_path)
    until(attempt, lambda: cloud.runs)
    cloud.troubles.append(Trouble("POST", ":cancel", error(403, "denied"), times=10**6))
    attempt.stop(30.0)
    until(attempt, lambda: cloud.asked("POST", ":cancel"))
    cloud.say(cloud.runs[0], "workerpool0-0", "not cancelled")
    succeed(cloud)
    until(attempt, lambda: attempt.over)
    assert attempt.succeeded
    assert (tmp_path / "master-0.log").read_text() == "not cancelled\n"
    assert "roles/aiplatform.user" in caplog.text


def test_output_that_takes_longer_to_fetch_than_the_end_is_waited_for_is_fetched_whole(cloud, tmp_path, monkeypatch):
    """The situation after days without a supervisor."""
    cloud.page = 1
    monkeypatch.setattr(logs, "PAGES", 1)
    monkeypatch.setattr(attempt, "ENDING_S", 0.5)
    running = begin(tmp_path)
    until(running, lambda: cloud.runs)
    for number in range(30):
        cloud.say(cloud.runs[0], "workerpool0-0", f"line {number}")
    succeed(cloud)
    until(running, lambda: running.over)
    assert (tmp_path / "master-0.log").read_text() == "".join(f"line {number}\n" for number in range(30))


def test_output_that_cannot_be_had_is_not_waited_for_for_ever_and_that_is_said(cloud, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(attempt, "ENDING_S", 0.3)
    running = begin(tmp_path)
    until(running, lambda: cloud.runs)
    cloud.troubles.append(Trouble("POST", "entries:list", error(503), times=10**6))
    succeed(cloud)
    until(running, lambda: running.over)
    assert running.succeeded
    assert "The rest of its output can't be fetched." in caplog.text


def test_who_takes_it_up_after_its_last_line_knows_that_line(cloud, tmp_path):
    first = begin(tmp_path)
    until(first, lambda: cloud.runs)
    cloud.say(cloud.runs[0], "workerpool0-0", "ValueError: too large")
    until(first, lambda: (tmp_path / "master-0.log").exists())
    first.close()
    message = "The replica workerpool0-0 exited with a non-zero status of 1. Termination reason: Error."
    cloud.runs[0].resource.update(state="JOB_STATE_FAILED", error={"code": 3, "message": message})
    second = begin(tmp_path)
    until(second, lambda: second.over)
    assert str(second.failure) == "master 0 ended with exit code 1: ValueError: too large"
