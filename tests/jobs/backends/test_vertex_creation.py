"""One CustomJob for an attempt, whichever messages are lost between here and a server on loopback."""

from __future__ import annotations

import time

import pytest

from footplate.jobs.backends.vertex.attempt_record import AttemptRecord
from footplate.jobs.backends.vertex.client import Refused
from jobs.backends.vertex_attempt import begin, created, until, wish
from jobs.backends.vertex_server import Trouble, error


@pytest.mark.parametrize("answer", [None, error(503, "backend error"), error(429, "rate")])
def test_an_answer_that_is_lost_creates_no_second_job(cloud, tmp_path, answer):
    cloud.troubles.append(Trouble("POST", "customJobs$", answer, done=True))
    attempt = begin(tmp_path)
    until(attempt, lambda: AttemptRecord.read(tmp_path).name)
    assert len(cloud.runs) == 1
    assert AttemptRecord.read(tmp_path).name == cloud.runs[0].resource["name"]


def test_a_request_that_never_arrived_is_made_again_once_it_is_clear_that_there_is_no_job(cloud, tmp_path):
    cloud.troubles += [
        Trouble("GET", "customJobs", error(500), times=2), Trouble("POST", "customJobs$", None, done=False, times=2)
    ]  # fmt: skip
    attempt = begin(tmp_path)
    until(attempt, lambda: AttemptRecord.read(tmp_path).name)
    assert len(cloud.runs) == 1
    looks = [where for verb, where, *_ in cloud.requests if verb == "GET" and "filter=" in where]
    assert len(looks) >= 5


def test_a_clock_that_was_put_back_meanwhile_keeps_nobody_from_asking_again(cloud, tmp_path):
    AttemptRecord(asked=time.time() + 3600).write(
        tmp_path
    )  # an hour ago, by the clock of then; the request never arrived
    attempt = begin(tmp_path)
    until(attempt, lambda: AttemptRecord.read(tmp_path).name)
    assert len(cloud.runs) == 1


def test_whoever_comes_after_a_kill_in_the_middle_of_creating_finds_the_job(cloud, tmp_path):
    AttemptRecord(asked=time.time()).write(tmp_path)  # the first one was killed before it had an answer
    body = created(cloud)
    attempt = begin(tmp_path)
    until(attempt, lambda: AttemptRecord.read(tmp_path).name == body.resource["name"])
    assert len(cloud.runs) == 1


@pytest.mark.parametrize("times", [0, 2])
def test_of_two_the_older_one_is_the_attempt_and_the_other_is_cancelled_however_long_that_takes(cloud, tmp_path, times):
    cloud.troubles.append(Trouble("POST", ":cancel", error(503), times=times))
    first, second = (created(cloud) for _ in range(2))
    attempt = begin(tmp_path)
    until(attempt, lambda: AttemptRecord.read(tmp_path).name)
    assert AttemptRecord.read(tmp_path).name == first.resource["name"]
    assert second.cancelled.is_set()
    assert not first.cancelled.is_set()


def test_what_is_refused_before_there_is_a_job_is_the_users_to_mend(cloud, tmp_path):
    cloud.troubles.append(Trouble("POST", "customJobs$", error(403, "Permission denied")))
    attempt = begin(tmp_path)
    until(attempt, lambda: attempt.over)
    assert attempt.failure is not None
    assert attempt.failure.mistake
    assert "roles/aiplatform.user" in attempt.failure.text
    assert not cloud.runs


def test_credentials_that_run_out_while_it_is_unclear_whether_there_is_a_job_do_not_forget_it(cloud, tmp_path):
    body = created(cloud)
    AttemptRecord(asked=time.time() - 3600).write(tmp_path)
    cloud.troubles.append(Trouble("GET", "customJobs", error(401, "expired"), times=2))
    attempt = begin(tmp_path)
    until(attempt, lambda: AttemptRecord.read(tmp_path).name == body.resource["name"])
    assert attempt.failure is None


def test_stop_before_it_was_asked_for_asks_for_nothing(cloud, tmp_path):
    attempt = begin(tmp_path)
    attempt.stop(30.0)
    assert attempt.over
    assert not cloud.requests


def test_a_bucket_that_is_gone_when_it_is_asked_for_again_is_no_deleted_job(cloud, tmp_path):
    cloud.troubles.append(Trouble("POST", "customJobs$", None, done=False))
    made = []

    def body():
        if made:
            raise Refused("There is no bucket gs://mine.", 404)
        made.append(wish())
        return made[0]

    attempt = begin(tmp_path, body)
    until(attempt, lambda: attempt.over)
    assert attempt.failure is not None
    assert attempt.failure.mistake
    assert attempt.failure.text == "There is no bucket gs://mine."
    assert not cloud.runs
