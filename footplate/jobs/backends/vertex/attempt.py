"""One attempt at Vertex AI, from the wish for a CustomJob to its end.

    submitting   there is to be one CustomJob (`submission.py`)
    running      ask for its state, often while that changes, seldom while it doesn't; fetch its output (`logs.py`)
    ending       its state is final: fetch what of the output is still to come

Trouble with the network, a quota, the disk, or credentials that have run out while the job runs, ends nothing: it is said
in the supervisor's log, and tried again. What is refused before there is a job is the user's to mend.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from footplate.core.errors import FootplateError
from footplate.jobs.backends.vertex import outcome
from footplate.jobs.backends.vertex.attempt_record import RecordFile
from footplate.jobs.backends.vertex.client import Client, Refused, Unanswered
from footplate.jobs.backends.vertex.creation import CustomJobCreation, cancel
from footplate.jobs.backends.vertex.logs import Output
from footplate.jobs.backends.vertex.polling import Pace
from footplate.jobs.record import Process
from footplate.launch.failure import Failure

log = logging.getLogger(__name__)

STATE_S = (0.5, 10.0)  # between two questions for the state
OUTPUT_S = (2.0, 10.0)  # Cloud Logging allows one question a second to a project
AGAIN_S = (1.0, 60.0)  # after a failure
REFUSED_S = 60.0  # after a refusal while the job runs: somebody may log in again
ENDING_PACE_S = 1.0  # between two questions for the rest of the output
QUIET_S = 3.0  # without a new entry, after the end
ENDING_S = 120.0  # without a new entry, after the end, when there should be more, or nobody answers
ERROR_S = 90.0  # for the reason of a failure, which comes up to a minute after the state

Phase = Literal["submitting", "running", "ending", "over"]


class CustomJob:
    """An attempt. Call `wait` until it is `over`.

    Args:
        client: asks Google.
        place: where CustomJobs are: `/v1/projects/…/locations/…/customJobs`.
        key: the attempt's.
        folder: for its output and its note.
        replica_ids: role and index of each replica.
        attempt: its number.
        body: makes the request that creates it, which may put packages into the bucket first.
    """

    def __init__(
        self,
        client: Client,
        place: str,
        key: str,
        folder: Path,
        replica_ids: list[tuple[str, int]],
        attempt: int,
        body: Callable[[], dict[str, Any]],
    ) -> None:
        self.succeeded = False
        self.failure: Failure | None = None
        self._client = client
        self._key = key
        self._record_file = RecordFile(folder)
        self._creation = CustomJobCreation(client, place, key, self._record_file, body)
        self._output = Output(self._record_file)
        self._phase: Phase = "running" if self._name else "submitting"
        self._stopping = False
        self._cancelled = False  # Vertex AI has been told
        self._ran = False
        self._job: dict[str, Any] = {}  # as Vertex AI had it last
        self._final_at = 0.0  # on the monotonic clock: when the state was seen to be final
        self._new_at = 0.0  # when output came last
        self._asking, self._reading, self._again = Pace(STATE_S), Pace(OUTPUT_S), Pace(AGAIN_S)
        self._said = ""
        now = time.time()
        self.processes = [Process(attempt, role, index, 0, 0.0, now) for role, index in replica_ids]

    @property
    def running(self) -> bool:
        """Whether all of its replicas have begun."""
        return self._ran

    @property
    def waits_for(self) -> str:
        """Why they have not."""
        if self._phase == "submitting":
            return self._said
        return {
            "JOB_STATE_QUEUED": "is in Vertex AI's queue, until the project's quota has room for it",
            "JOB_STATE_PENDING": "waits at Vertex AI for its machines",
        }.get(self._state, "")

    @property
    def over(self) -> bool:
        """Whether it has ended, and its output is here."""
        return self._phase == "over"

    @property
    def _to_cancel(self) -> bool:
        return self._stopping and not self._cancelled and self._phase == "running"

    @property
    def _name(self) -> str:
        return self._record_file.record.name or ""

    @property
    def _state(self) -> str:
        return str(self._job.get("state", ""))

    def wait(self, timeout_s: float) -> list[Process]:
        """Hear it for so long; returns the replicas that have ended since the last time."""
        until = time.monotonic() + timeout_s
        while not self.over:
            left = until - time.monotonic()
            pause = self._due() - time.monotonic()
            if pause > 0:
                time.sleep(max(0.0, min(pause, left)))
                if pause >= left:
                    return []
            self._go_on()
            if left <= 0:
                break
        return self._end_processes() if self.over else []

    def stop(self, grace_s: float) -> None:
        """Have it cancelled. How long its programs then have is Vertex AI's to say."""
        self._stopping = True
        self._asking.quicken(0.0)
        self._again.quicken(0.0)
        if self._phase == "submitting" and not self._creation.asked:
            self._phase = "over"

    def close(self) -> None:
        """Hear it no longer; it goes on."""
        self._output.close()

    def _due(self) -> float:
        """When there is something to do."""
        asking, reading = self._asking.due, self._reading.due
        due = {"submitting": asking, "running": min(asking, reading), "ending": reading}
        return max(self._again.due, 0.0 if self._to_cancel else due.get(self._phase, 0.0))

    def _go_on(self) -> None:
        """Do what is due. Every failure is dealt with here."""
        try:
            if self._phase == "submitting":
                self._submit()
            else:
                self._hear()
            self._again.quicken(0.0)
        except (Unanswered, OSError) as error:
            self._say(str(error))
            self._again.later(2.0)
            if self._phase == "ending" and time.monotonic() > self._new_at + ENDING_S:
                self._say("The rest of its output can't be had.")
                self._conclude()
        except FootplateError as error:
            self._refused(error)

    def _refused(self, error: FootplateError) -> None:
        if self._phase == "submitting" and not self._creation.asked:
            self._fail(str(error))
        elif self._phase != "submitting" and isinstance(error, Refused) and error.status == 404:
            self._fail("its CustomJob was deleted at Vertex AI")
        else:
            self._say(str(error))
            self._again.due = time.monotonic() + REFUSED_S

    def _fail(self, text: str) -> None:
        self.failure = Failure("exception", text, time.monotonic(), mistake=True)
        self._phase = "over"

    def _submit(self) -> None:
        if not self._creation.find():
            if self._creation.asked:
                self._asking.later()
                return
            if self._stopping:
                self._phase = "over"
                return
            self._creation.create()
        self._phase = "running"
        self._asking.quicken()

    def _hear(self) -> None:
        if self._phase == "running" and time.monotonic() >= self._asking.due:
            self._ask_state()
        if time.monotonic() >= self._reading.due:
            self._read()
        if self._to_cancel:  # last: if it is refused, its end and its output are heard all the same
            cancel(self._client, self._name)
            self._cancelled = True

    def _ask_state(self) -> None:
        before = self._state
        self._job = self._client.ask("aiplatform", "GET", f"/v1/{self._name}")
        if self._state == before:
            self._asking.later()
        else:
            log.warning("%s: %s", self._key, self._state)
            self._ran = self._ran or self._state in outcome.RUNNING
            self._asking.quicken()
        if self._state not in outcome.FINAL:
            return
        now = time.monotonic()
        self._final_at = self._final_at or now
        if self._state != "JOB_STATE_FAILED" or "error" in self._job or now > self._final_at + ERROR_S:
            self._phase, self._new_at = "ending", now
            self._reading.quicken(0.0)

    def _read(self) -> None:
        """Fetch output; at the end, until nothing has come for twice as long as entries took to arrive."""
        ending = self._phase == "ending"
        try:
            new = self._output.fetch(self._client, self._name)
        except Refused as error:  # who may not read the log gets no output, and the job runs all the same
            self._say(f"Its output can't be had. {error}")
            self._reading.due = time.monotonic() + REFUSED_S
            if ending:
                self._conclude()
            return
        now = time.monotonic()
        if new:
            self._new_at = now
            self._reading.quicken()
        else:
            self._reading.later()
        if not ending:
            return
        self._reading.due = now + ENDING_PACE_S
        quiet_s = max(QUIET_S, 2 * self._output.longest_delay_s)
        if now > self._new_at + (ENDING_S if self._output.more else min(quiet_s, ENDING_S)):
            self._conclude()

    def _conclude(self) -> None:
        """Say how it ended."""
        self._phase = "over"
        self.succeeded = self._state == "JOB_STATE_SUCCEEDED"
        if not self.succeeded and not self._stopping:
            self.failure = outcome.failure(self._job, self._output.last_line)

    def _end_processes(self) -> list[Process]:
        """The replicas whose end nobody was told of yet."""
        left = [one for one in self.processes if one.ended is None]
        now = time.time()
        ended = [
            replace(one, ended=now, outcome=outcome.outcome(self._job, one.role, one.index, self._output.last_line))
            for one in left
        ]
        self.processes = [*(one for one in self.processes if one.ended is not None), *ended]
        return ended

    def _say(self, text: str) -> None:
        """Into the supervisor's log, once for each thing that is wrong."""
        if text != self._said:
            log.warning("%s: %s", self._key, text)
        self._said = text
