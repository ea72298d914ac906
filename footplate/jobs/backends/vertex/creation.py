"""One CustomJob for an attempt, whatever gets lost on the way.

    find      is there a job with this attempt's label? ──► it is the attempt's
    create    there is none ──► the packages into the bucket ──► note that one is asked for ──► ask for it

Creating isn't idempotent, and an answer may get lost, with us or with the network. So that one is created is noted before
it is asked for. While the note has no name, whoever comes next looks for the label, for `SETTLED_S` since it was asked for,
and only then asks again. Should there be two all the same, the older one is the attempt, and the other is cancelled.
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

SETTLED_S = 20.0  # after which a job that was asked for would be found


class CustomJobCreation:
    """The wish for a CustomJob.

    Args:
        client: asks Google.
        place: where CustomJobs are: `/v1/projects/…/locations/…/customJobs`.
        key: the attempt's.
        record_file: where it is noted.
        body: makes the request that creates it, which may put packages into the bucket first.
    """

    def __init__(
        self, client: Client, place: str, key: str, record_file: RecordFile, body: Callable[[], dict[str, Any]]
    ) -> None:
        self._client = client
        self._place = place
        self._key = key
        self._record_file = record_file
        self._body = body

    @property
    def asked(self) -> bool:
        """Whether there may be a CustomJob."""
        return self._record_file.record.asked is not None

    def find(self) -> bool:
        """Look for it; whether it is there, and its name is noted. That it isn't is clear only when none was `asked` for.

        Raises:
            Unanswered: perhaps later.
            Refused: never.
        """
        found = self._look()
        for other in found[1:]:
            cancel(self._client, other["name"])
        if found:
            self._keep(found[0])
            return True
        asked = self._record_file.record.asked
        if asked is not None and abs(time.time() - asked) >= SETTLED_S:  # a clock may be put back
            self._record_file.change(asked=None)
        return False

    def create(self) -> None:
        """Create it, and note its name.

        Raises:
            Unanswered: it may be there all the same, unless none was `asked` for.
            FootplateError: it can't be created.
        """
        body = self._body()
        self._record_file.change(asked=time.time())
        try:
            made = self._client.ask("aiplatform", "POST", self._place, body)
        except Refused:  # so there is none
            self._record_file.change(asked=None)
            raise
        self._keep(made)

    def _look(self) -> list[dict[str, Any]]:
        """The jobs with this attempt's label, the oldest first; those that are cancelled stand behind the others."""
        asked = {"filter": f"labels.{LABEL}={mark(self._key)}", "pageSize": "100"}
        found: list[dict[str, Any]] = []
        while True:
            page = self._client.ask("aiplatform", "GET", self._place, params=asked)
            found += page.get("customJobs", [])
            if not page.get("nextPageToken"):
                break
            asked["pageToken"] = page["nextPageToken"]
        gone = ("JOB_STATE_CANCELLING", "JOB_STATE_CANCELLED")
        return sorted(found, key=lambda one: (one.get("state") in gone, to_time(one.get("createTime", ""))))

    def _keep(self, job: dict[str, Any]) -> None:
        self._record_file.change(asked=self._record_file.record.asked or time.time(), name=job["name"])
        log.warning("%s is %s", self._key, job["name"])


def cancel(client: Client, name: str) -> None:
    """Have a job cancelled, unless it has ended already.

    Raises:
        Unanswered: perhaps later.
        Refused: never.
    """
    try:
        client.ask("aiplatform", "POST", f"/v1/{name}:cancel", {})
    except Refused as error:
        if error.status not in (400, 404):
            raise
        log.info("%s: %s", name, error)
