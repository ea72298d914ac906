"""Questions to a job on a Ray cluster, over the cluster's Jobs API: where its processes are, and a profile.

A question is a small Ray Job beside the attempt's (`question.py`). Its output is the answer. So every machine that reaches
the dashboard can ask, as it could submit the job. The supervisor isn't needed.

The request for it has the question, the name of the job, and the URI of the files that the cluster has already for the
attempt. It has no variable of this machine and none of the job. A question that is answered is deleted from Ray's list.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from footplate.core.errors import ConfigError, Unavailable
from footplate.core.profile_requests import ProfileStatus
from footplate.jobs.backends.ray.client import Away, Client, Info, Refused
from footplate.jobs.backends.ray.log_protocol import events_in
from footplate.jobs.backends.ray.question import ENTRY_POINT, VARIABLE
from footplate.jobs.questions import no_process
from footplate.jobs.store.jobs import WrongState

# Ray starts a process, and that asks the replicas.
ANSWER_S = 120.0
# A cluster that is away for this long has lost a profile.
AWAY_S = 60.0
POLL_S = 0.25
# An answered question ends at once, but a busy cluster sees that later.
DELETE_S = 30.0
_ERRORS = {"state": WrongState, "unavailable": Unavailable, "config": ConfigError}


class RayProcesses:
    """The processes of an attempt on a Ray cluster. Implements `RunningProcesses`.

    Args:
        job: the job's name.
        address: the address of the cluster's Jobs API.
        key: the attempt's key.
    """

    def __init__(self, job: str, address: str, key: str) -> None:
        self._job = job
        self._client = Client(address)
        self._key = key

    def stacks(self, native: bool = False) -> str:
        """The stacks of all processes, as text."""
        question = self._ask("stacks", native=native)
        text = question.wait_for("stacks")["text"]
        question.delete()
        return text

    def profile(self, steps: int) -> RayProfile:
        """Begin a profile of the next steps, on all ranks."""
        question = self._ask("profile", steps=steps)
        return RayProfile(question.wait_for("accepted")["step"], question)

    def _ask(self, what: str, **arguments: Any) -> _Question:
        document = {"job": self._job, "key": self._key, "question": what, **arguments}
        try:
            attempt = self._client.info(self._key)
            if attempt is None or attempt.ended:
                raise no_process(self._job)
            question = _Question(self._client, f"{self._key}-{what}-{uuid.uuid4().hex[:8]}")
            self._client.submit(submission(question.key, document, attempt.working_dir))
        except Away as error:
            raise Unavailable(_away(self._client, error)) from None
        except Refused as error:
            raise Unavailable(f"the Ray cluster at {self._client.address} refuses the question: {error}.") from None
        return question


class RayProfile:
    """A profile that a training on Ray has begun. Implements `RunningProfile`."""

    def __init__(self, step: int, question: _Question) -> None:
        self.step = step
        self._question = question
        self._latest = ProfileStatus("waiting")
        self._heard_at = time.monotonic()

    def status(self) -> ProfileStatus:
        """What has become of the profile. A network that fails for a while leaves it as it was."""
        if self._latest.is_final:
            return self._latest
        try:
            info, events = self._question.read()
        except Away as error:
            if time.monotonic() - self._heard_at > AWAY_S:
                self._latest = ProfileStatus("failed", error=_away(self._question.client, error).removesuffix("."))
            return self._latest
        self._heard_at = time.monotonic()
        for event in events:
            if event["event"] == "status":
                self._latest = ProfileStatus(event["state"], event["directory"], event["summary"], event["error"])
        if not self._latest.is_final and (info is None or info.ended):
            self._latest = ProfileStatus("failed", error="the cluster has lost the question")
        if self._latest.is_final:
            self._question.delete()
        return self._latest


class _Question:
    """A question that was submitted."""

    def __init__(self, client: Client, key: str) -> None:
        self.client = client
        self.key = key

    def read(self) -> tuple[Info | None, list[dict[str, Any]]]:
        """The state of its Ray Job, and its events so far. May raise `Away`."""
        info = self.client.info(self.key)
        return info, events_in(self.client.whole_output(self.key)) if info is not None else []

    def wait_for(self, name: str) -> dict[str, Any]:
        """Wait for an event.

        Raises:
            ConfigError: the replicas can't answer, or the cluster can't ask them.
        """
        until, trouble = time.monotonic() + ANSWER_S, f"no answer came in {ANSWER_S:g} s"
        while time.monotonic() < until:
            try:
                info, events = self.read()
            except Away as error:
                trouble = str(error)
                time.sleep(POLL_S)
                continue
            for event in events:
                if event["event"] == "refused":
                    self.delete()
                    raise _ERRORS.get(event["kind"], ConfigError)(event["text"])
                if event["event"] == name:
                    return event
            if info is None or info.ended:
                trouble = self._last_line(info)
                break
            time.sleep(POLL_S)
        else:
            self._stop()
        raise Unavailable(f"the Ray cluster at {self.client.address} could not ask the job: {trouble}.")

    def delete(self) -> None:
        """Delete it from Ray's list, if it ends soon. Otherwise it stays there, as other jobs do."""
        until = time.monotonic() + DELETE_S
        try:
            while time.monotonic() < until:
                info = self.client.info(self.key)
                if info is None:
                    return
                if info.ended:
                    self.client.delete(self.key)
                    return
                time.sleep(POLL_S)
        except Away:
            return

    def _stop(self) -> None:
        try:
            self.client.stop(self.key)
        except Away:
            return

    def _last_line(self, info: Info | None) -> str:
        try:
            text = self.client.whole_output(self.key) or (info.message if info else "")
        except Away as error:
            text = str(error)
        return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it was lost").rstrip(".")


def submission(key: str, question: dict[str, Any], working_dir: str) -> dict[str, Any]:
    """The arguments of `submit_job` for a question.

    Args:
        key: the question's own key.
        question: plain values.
        working_dir: the URI of the attempt's files.
    """
    return {
        "submission_id": key,
        "entrypoint": ENTRY_POINT,
        "runtime_env": {"working_dir": working_dir, "env_vars": {VARIABLE: json.dumps(question, sort_keys=True)}},
        "metadata": {"footplate_question": question["job"]},
    }


def _away(client: Client, error: Away) -> str:
    return f"the Ray cluster at {client.address} does not answer: {error}."
