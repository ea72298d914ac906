"""An attempt on Vertex AI, from the request for a CustomJob to its end.

    submitting   create one CustomJob (`creation.py`)
    running      poll its state, often while the state changes, rarely while it doesn't; fetch its output (`logs.py`)
    ending       its state is final: fetch the rest of the output

A failing network, a quota, a full disk, or credentials that expire while the job runs, end nothing: the problem is written
to the supervisor's log, and the request is retried. A refusal before there is a CustomJob fails the job.
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
from footplate.jobs.record import Process
from footplate.launch.failure import Failure

log = logging.getLogger(__name__)

# Shortest and longest time between two questions for the state.
STATE_S = (0.5, 10.0)
# The same for the output. Cloud Logging allows a project one question a second.
OUTPUT_S = (2.0, 10.0)
# The same after a failure.
AGAIN_S = (1.0, 60.0)
# After a refusal while the job runs: the user may log in again.
REFUSED_S = 60.0
# Between two questions for the rest of the output.
ENDING_PACE_S = 1.0
# The output is complete when nothing has come for this time after the end,
QUIET_S = 3.0
# or for this time if there should be more, or nobody answers.
ENDING_S = 120.0
# The reason of a failure may come up to a minute after the state.
ERROR_S = 90.0

Phase = Literal["submitting", "running", "ending", "over"]


class PollTimer:
    """The time of the next request: later and later, until something happens.

    Attributes:
        due: the time of the next request, on the monotonic clock.

    Args:
        bounds: the shortest and the longest time between two requests, in seconds.
    """

    def __init__(self, bounds: tuple[float, float]) -> None:
        self._bounds = bounds
        self._delay_s = bounds[0]
        self.due = 0.0

    def reset(self, within_s: float | None = None) -> None:
        """Make the next request after `within_s`, by default after the shortest time. Call it after a change."""
        self._delay_s = self._bounds[0]
        self.due = time.monotonic() + (self._delay_s if within_s is None else within_s)

    def back_off(self, factor: float = 1.3) -> None:
        """Wait longer before the next request, each time by this factor. Call it if nothing has changed."""
        self.due = time.monotonic() + self._delay_s
        self._delay_s = min(self._delay_s * factor, self._bounds[1])


class CustomJob:
    """An attempt on Vertex AI. Implements `Attempt`. Call `wait` until it is `over`.

    Args:
        client: makes requests to Google.
        parent: the path of the CustomJobs: `/v1/projects/…/locations/…/customJobs`.
        key: the attempt's key.
        folder: the folder for its output and its record.
        replica_ids: role and index of each replica.
        attempt: the attempt's number.
        body: makes the request that creates the CustomJob. It may upload packages first.
    """

    def __init__(
        self,
        client: Client,
        parent: str,
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
        self._creation = CustomJobCreation(client, parent, key, self._record_file, body)
        self._output = Output(self._record_file)
        self._phase: Phase = "running" if self._name else "submitting"
        self._stopping = False
        # True when Vertex AI has the request to cancel.
        self._cancelled = False
        self._ran = False
        # Vertex AI's last answer.
        self._job: dict[str, Any] = {}
        # On the monotonic clock: when the state was first seen to be final, and when output last came.
        self._final_at = 0.0
        self._new_at = 0.0
        self._asking, self._reading, self._again = PollTimer(STATE_S), PollTimer(OUTPUT_S), PollTimer(AGAIN_S)
        self._problem = ""
        now = time.time()
        self.processes = [Process(attempt, role, index, 0, 0.0, now) for role, index in replica_ids]

    @property
    def running(self) -> bool:
        """True when all of its replicas have begun."""
        return self._ran

    @property
    def waits_for(self) -> str:
        """The reason why the replicas haven't begun."""
        if self._phase == "submitting":
            return self._problem
        return {
            "JOB_STATE_QUEUED": "is in Vertex AI's queue, until the project's quota has room for it",
            "JOB_STATE_PENDING": "waits at Vertex AI for its machines",
        }.get(self._state, "")

    @property
    def over(self) -> bool:
        """True when it has ended, and its output is here."""
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
        """Follow the attempt for `timeout_s`. Returns the replicas that have ended since the last call."""
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
        """Cancel the CustomJob. Vertex AI decides how long its programs have to end."""
        self._stopping = True
        self._asking.reset(0.0)
        self._again.reset(0.0)
        if self._phase == "submitting" and not self._creation.asked:
            self._phase = "over"

    def close(self) -> None:
        """Stop following. The attempt goes on."""
        self._output.close()

    def _due(self) -> float:
        """The time of the next request, on the monotonic clock."""
        asking, reading = self._asking.due, self._reading.due
        due = {"submitting": asking, "running": min(asking, reading), "ending": reading}
        return max(self._again.due, 0.0 if self._to_cancel else due.get(self._phase, 0.0))

    def _go_on(self) -> None:
        """Do what is due, and handle every failure."""
        try:
            if self._phase == "submitting":
                self._submit()
            else:
                self._follow()
            self._again.reset(0.0)
        except (Unanswered, OSError) as error:
            self._say(str(error))
            self._again.back_off(2.0)
            if self._phase == "ending" and time.monotonic() > self._new_at + ENDING_S:
                self._say("The rest of its output can't be fetched.")
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
                self._asking.back_off()
                return
            if self._stopping:
                self._phase = "over"
                return
            self._creation.create()
        self._phase = "running"
        self._asking.reset()

    def _follow(self) -> None:
        if self._phase == "running" and time.monotonic() >= self._asking.due:
            self._ask_state()
        if time.monotonic() >= self._reading.due:
            self._read()
        # Last: if the request to cancel is refused, the end and the output are still fetched.
        if self._to_cancel:
            cancel(self._client, self._name)
            self._cancelled = True

    def _ask_state(self) -> None:
        before = self._state
        self._job = self._client.ask("aiplatform", "GET", f"/v1/{self._name}")
        if self._state == before:
            self._asking.back_off()
        else:
            log.warning("%s: %s", self._key, self._state)
            self._ran = self._ran or self._state in outcome.RUNNING
            self._asking.reset()
        if self._state not in outcome.FINAL:
            return
        now = time.monotonic()
        self._final_at = self._final_at or now
        if self._state != "JOB_STATE_FAILED" or "error" in self._job or now > self._final_at + ERROR_S:
            self._phase, self._new_at = "ending", now
            self._reading.reset(0.0)

    def _read(self) -> None:
        """Fetch output. At the end, go on until nothing has come for twice the time that entries took to arrive."""
        ending = self._phase == "ending"
        try:
            new = self._output.fetch(self._client, self._name)
        except Refused as error:
            # Without permission to read the log there is no output, but the job runs.
            self._say(f"Its output can't be fetched. {error}")
            self._reading.due = time.monotonic() + REFUSED_S
            if ending:
                self._conclude()
            return
        now = time.monotonic()
        if new:
            self._new_at = now
            self._reading.reset()
        else:
            self._reading.back_off()
        if not ending:
            return
        self._reading.due = now + ENDING_PACE_S
        quiet_s = max(QUIET_S, 2 * self._output.longest_delay_s)
        if now > self._new_at + (ENDING_S if self._output.more else min(quiet_s, ENDING_S)):
            self._conclude()

    def _conclude(self) -> None:
        """Judge the attempt."""
        self._phase = "over"
        self.succeeded = self._state == "JOB_STATE_SUCCEEDED"
        if not self.succeeded and not self._stopping:
            self.failure = outcome.failure(self._job, self._output.last_line)

    def _end_processes(self) -> list[Process]:
        """The replicas whose ends haven't been returned yet."""
        left = [process for process in self.processes if process.ended is None]
        now = time.time()
        ended = []
        for process in left:
            text = outcome.outcome(self._job, process.role, process.index, self._output.last_line)
            ended.append(replace(process, ended=now, outcome=text))
        self.processes = [*(process for process in self.processes if process.ended is not None), *ended]
        return ended

    def _say(self, text: str) -> None:
        """Write a problem into the supervisor's log, once."""
        if text != self._problem:
            log.warning("%s: %s", self._key, text)
        self._problem = text
