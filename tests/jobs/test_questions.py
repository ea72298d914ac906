"""One answer of several machines: which are asked, and what counts if one doesn't answer."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest

from footplate.core.errors import ConfigError, Unavailable
from footplate.core.profile_requests import ProfileRequest, ProfileStatus
from footplate.core.stacks.snapshot import Frame, Process, Thread
from footplate.jobs.questions import JobProcesses, ProcessesHere, Silent
from footplate.jobs.store.jobs import WrongState

REQUEST = ProfileRequest([], "id", 7, "/run", 1.0)
DONE, WRITING = ProfileStatus("done", "/run/profile-8", "Profile"), ProfileStatus("writing")


@dataclass
class Machine:
    """A machine with given answers. An answer that is an exception is raised."""

    name: str
    answers: dict[str, Any]
    asked: list[str] = field(default_factory=list)

    def _answer(self, question: str) -> Any:
        self.asked.append(question)
        answer = self.answers[question]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stacks(self, native: bool) -> Any:
        return self._answer("stacks")

    def request_profile(self, steps: int) -> Any:
        return self._answer("request_profile")

    def profile_status(self, request: ProfileRequest) -> Any:
        return self._answer("profile_status")

    def unfinished(self) -> Any:
        return self._answer("unfinished")


def rank(number: int) -> Process:
    thread = Thread("MainThread", True, (Frame("train", "/task.py", 3),))
    return Process(100 + number, "python", threads=(thread,), source="answer", rank=number, world_size=2)


def test_ranks_of_all_machines_are_one_answer_and_silent_machines_are_named():
    lost = Silent("worker-1 has ended, or was lost")
    machines = [Machine("worker-0", {"stacks": [rank(1)]}), Machine("master-0", {"stacks": [rank(0)]})]
    text = JobProcesses("my_job", machines).stacks()
    assert text.splitlines()[0] == "ranks 0 and 1 are in `train` (/task.py:3)"
    assert text.index("rank 0: process 100") < text.index("rank 1: process 101")
    text = JobProcesses("my_job", [*machines, Machine("worker-1", {"stacks": lost})]).stacks()
    assert text.endswith("\nworker-1 has ended, or was lost\n")
    with pytest.raises(Unavailable, match=r"^my_job: worker-1 has ended, or was lost\.$"):
        JobProcesses("my_job", [Machine("worker-1", {"stacks": lost})]).stacks()
    with pytest.raises(WrongState, match="my_job has no process now"):
        JobProcesses("my_job", [Machine("master-0", {"stacks": []})]).stacks()


def test_the_first_machine_that_trains_makes_the_profile_and_all_ranks_finish_it():
    server = Machine("parameter_server-0", {"request_profile": ConfigError("no training"), "unfinished": None})
    worker = Machine("worker-0", {"request_profile": REQUEST, "profile_status": DONE})
    other = Machine("worker-1", {"unfinished": WRITING})
    profile = JobProcesses("my_job", [server, worker, other]).profile(3)
    assert profile.step == 7
    assert profile.status() == WRITING
    other.answers["unfinished"] = None
    assert profile.status() == DONE
    other.answers["unfinished"] = Silent("worker-1 has ended")
    assert profile.status() == DONE
    worker.answers["profile_status"] = ProfileStatus("recording")
    assert profile.status().state == "recording"
    worker.answers["profile_status"] = Silent("worker-0 has ended, or was lost")
    assert profile.status() == ProfileStatus("failed", error="worker-0 has ended, or was lost")


def test_a_profile_that_nobody_can_make_has_one_clear_error():
    idle, busy = ConfigError("no training runs"), Unavailable("a profile is being made already")
    silent = Silent("worker-0 did not answer in 40 s")

    def of(*answers: Any) -> JobProcesses:
        return JobProcesses("my_job", [Machine("any", {"request_profile": answer}) for answer in answers])

    with pytest.raises(ConfigError, match="no training runs"):
        of(idle, idle).profile(3)
    with pytest.raises(Unavailable, match="a profile is being made already"):
        of(idle, busy, REQUEST).profile(3)
    with pytest.raises(Unavailable, match=r"worker-0 did not answer in 40 s\."):
        of(silent, idle).profile(3)


def test_processes_of_this_machine_are_asked_themselves():
    here = ProcessesHere([os.getpid()])
    (process,) = here.stacks(native=False)
    assert process.pid == os.getpid()
    assert here.unfinished() is None
    with pytest.raises(ConfigError, match=r"no Trainer\.fit runs in these processes now"):
        here.request_profile(2)
