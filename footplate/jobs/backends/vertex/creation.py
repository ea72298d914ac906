"""Create exactly one CustomJob for an attempt, whatever message is lost.

    find      is there a CustomJob with this attempt's label? ──► it is the attempt's
    create    there is none ──► upload the packages ──► record that one is requested ──► request it

Creation isn't idempotent, and the answer may be lost, by the supervisor or by the network. So the request is recorded
before it is sent. While the record has no name, a supervisor searches for the label for `SETTLED_S` after the request, and
only then requests again. If there are two after all, the older one is the attempt's, and the other is cancelled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from footplate.jobs.backends.vertex.attempt_record import RecordFile
from footplate.jobs.backends.vertex.client import Client, Refused
from footplate.jobs.backends.vertex.request import LABEL, mark
from footplate.jobs.backends.vertex.timestamps import to_time

log = logging.getLogger(__name__)

# A requested job can be found after this time.
SETTLED_S = 20.0


class CustomJobCreation:
    """Creates an attempt's CustomJob.

    Args:
        client: makes requests to Google.
        parent: the path of the CustomJobs: `/v1/projects/…/locations/…/customJobs`.
        key: the attempt's key.
        record_file: the attempt's record.
        body: makes the request that creates the CustomJob. It may upload packages first.
    """

    def __init__(
        self, client: Client, parent: str, key: str, record_file: RecordFile, body: Callable[[], dict[str, Any]]
    ) -> None:
        self._client = client
        self._parent = parent
        self._key = key
        self._record_file = record_file
        self._body = body

    @property
    def asked(self) -> bool:
        """True if there may be a CustomJob."""
        return self._record_file.record.asked is not None

    def find(self) -> bool:
        """Search for the CustomJob, and record its name. Returns True if it exists.

        If it isn't found, it certainly doesn't exist only when none was `asked` for.

        Raises:
            Unanswered: a retry may help.
            Refused: a retry won't help.
        """
        jobs = self._look()
        for other in jobs[1:]:
            cancel(self._client, other["name"])
        if jobs:
            self._keep(jobs[0])
            return True
        asked = self._record_file.record.asked
        # The difference is negative if the clock was set back.
        if asked is not None and abs(time.time() - asked) >= SETTLED_S:
            self._record_file.change(asked=None)
        return False

    def create(self) -> None:
        """Create the CustomJob, and record its name.

        Raises:
            Unanswered: there was no answer; the job may exist, unless none was `asked` for.
            FootplateError: it can't be created.
        """
        body = self._body()
        self._record_file.change(asked=time.time())
        try:
            job = self._client.ask("aiplatform", "POST", self._parent, body)
        except Refused:
            # Vertex AI has created no CustomJob.
            self._record_file.change(asked=None)
            raise
        self._keep(job)

    def _look(self) -> list[dict[str, Any]]:
        """The CustomJobs with this attempt's label, the oldest first; cancelled ones come last."""
        asked = {"filter": f"labels.{LABEL}={mark(self._key)}", "pageSize": "100"}
        jobs: list[dict[str, Any]] = []
        while True:
            page = self._client.ask("aiplatform", "GET", self._parent, params=asked)
            jobs += page.get("customJobs", [])
            if not page.get("nextPageToken"):
                break
            asked["pageToken"] = page["nextPageToken"]
        gone = ("JOB_STATE_CANCELLING", "JOB_STATE_CANCELLED")
        return sorted(jobs, key=lambda job: (job.get("state") in gone, to_time(job.get("createTime", ""))))

    def _keep(self, job: dict[str, Any]) -> None:
        self._record_file.change(asked=self._record_file.record.asked or time.time(), name=job["name"])
        log.warning("%s is %s", self._key, job["name"])


def cancel(client: Client, name: str) -> None:
    """Cancel a job, unless it has ended.

    Raises:
        Unanswered: a retry may help.
        Refused: a retry won't help.
    """
    try:
        client.ask("aiplatform", "POST", f"/v1/{name}:cancel", {})
    except Refused as error:
        if error.status not in (400, 404):
            raise
        log.info("%s: %s", name, error)
