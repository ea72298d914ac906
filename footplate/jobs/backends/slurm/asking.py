"""Questions to a job on Slurm: where its processes are, and a profile.

    login node                      shared disk                       the cluster
    a question ── appends ──►  questions.jsonl  ── reads ──►  entrypoint.py
                                                                  │ srun's standard input
                                                                  ▼
    its answer ◄── reads ───  answer-ID.json   ◄── writes ──  replica.py: ProcessesHere

The job's processes are in steps of their own, and no port is open. A question needs no step of Slurm, so it is answered on
a full cluster, too. The one who asks creates the file of the answer, and deletes it.

A replica ends with its processes. A profile that is complete by then is found on the disk.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from footplate.core.errors import ConfigError, Unavailable
from footplate.core.profile_requests import LIMIT_S as PROFILE_S
from footplate.core.profile_requests import STATUS_LIMIT_S, ProfileRequest, ProfileStatus, written
from footplate.core.stacks.snapshot import Process
from footplate.jobs import questions
from footplate.jobs.backends.slurm import attempt_files
from footplate.jobs.questions import JobProcesses, ProcessesHere, Silent
from footplate.jobs.record import Process as JobProcess

# The shared disk may show a question or an answer late.
MORE_S = 60.0
POLL_S = 0.1


def job_processes(job: str, processes: Iterable[JobProcess], folder: Path) -> JobProcesses:
    """Return the running processes of an attempt, to ask them.

    Args:
        job: the job's name.
        processes: those of the attempt.
        folder: the attempt's folder.
    """
    return JobProcesses(
        job,
        [SlurmReplica(folder, each.role, each.index) for each in processes if each.ended is None and not each.outcome],
    )


@dataclass(frozen=True)
class SlurmReplica:
    """A replica on its node. Implements `jobs.questions.Machine`."""

    folder: Path
    role: str
    index: int

    @property
    def name(self) -> str:
        """Its role and number."""
        return f"{self.role}-{self.index}"

    def stacks(self, native: bool) -> list[Process]:
        return [Process.from_dict(each) for each in self._ask(questions.LIMIT_S, "stacks", native=native)]

    def request_profile(self, steps: int) -> ProfileRequest:
        return ProfileRequest.from_dict(self._ask(PROFILE_S, "request_profile", steps=steps))

    def profile_status(self, request: ProfileRequest) -> ProfileStatus:
        try:
            return ProfileStatus(**self._ask(STATUS_LIMIT_S, "profile_status", request=request.to_dict()))
        except Silent:
            status = written(request)
            if status is None:
                raise
            return status

    def unfinished(self) -> ProfileStatus | None:
        status = self._ask(STATUS_LIMIT_S, "unfinished")
        return ProfileStatus(**status) if status else None

    def _ask(self, limit_s: float, question: str, **arguments: Any) -> Any:
        identity = uuid.uuid4().hex[:12]
        answer = attempt_files.answer(self.folder, identity)
        answer.touch(mode=0o600)
        try:
            attempt_files.add_line(
                self.folder / attempt_files.QUESTIONS,
                {"id": identity, "role": self.role, "index": self.index, "question": question, "arguments": arguments},
            )
            until = time.monotonic() + limit_s + MORE_S
            while not (text := answer.read_text()).endswith("\n"):
                if attempt_files.is_over(self.folder, self.role, self.index):
                    raise Silent(f"{self.name} has ended, or was lost")
                if time.monotonic() > until:
                    raise Silent(f"{self.name} did not answer in {limit_s + MORE_S:g} s")
                time.sleep(POLL_S)
        finally:
            answer.unlink(missing_ok=True)
        reply = json.loads(text)
        if error := reply.get("error"):
            raise (Unavailable if reply["unavailable"] else ConfigError)(error)
        return reply["value"]


def answer_beside(folder: Path, message: Mapping[str, Any], pids: Sequence[int]) -> None:
    """Answer a question in a thread of its own. The replica calls this.

    Args:
        folder: the attempt's folder.
        message: the question, as `SlurmReplica` has written it.
        pids: the replica's processes.
    """
    threading.Thread(target=_answer, args=(folder, message, ProcessesHere(pids)), daemon=True).start()


def _answer(folder: Path, message: Mapping[str, Any], processes: ProcessesHere) -> None:
    arguments = message["arguments"]
    answers: dict[str, Callable[[], Any]] = {
        "stacks": lambda: [each.to_dict() for each in processes.stacks(arguments["native"])],
        "request_profile": lambda: processes.request_profile(arguments["steps"]).to_dict(),
        "profile_status": lambda: asdict(processes.profile_status(ProfileRequest.from_dict(arguments["request"]))),
        "unfinished": lambda: asdict(status) if (status := processes.unfinished()) else None,
    }
    try:
        reply = {"value": answers[message["question"]]()}
    except ConfigError as error:
        reply = {"error": str(error), "unavailable": isinstance(error, Unavailable)}
    attempt_files.fill(attempt_files.answer(folder, message["id"]), reply)
