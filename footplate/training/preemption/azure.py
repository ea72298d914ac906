"""Microsoft's Azure.

Its metadata server lists scheduled events (https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events). The
machine will be gone, or will have lost what it is doing, after a Preempt (a spot machine, thirty seconds before), a
Terminate, a Reboot or a Redeploy. It trains on through a Freeze, which takes seconds. An event may be about other machines
of the same set: it names them. Microsoft says to ask every second. The first answer may take two minutes.
"""

from __future__ import annotations

import json
import os
from typing import Any

from footplate.training.preemption.notices import MetadataServer, PolledNotices, dmi

POLL_S = 1.0
ANSWER_S = 150.0
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}
ENDS = {
    "Preempt": "this spot machine is being preempted",
    "Terminate": "this machine will be deleted",
    "Reboot": "this machine will be rebooted",
    "Redeploy": "this machine will be moved to other hardware, without its memory",
}
# Azure's machines have this tag in their firmware, and no others do.
TAG = "7783-7084-3265-9085-8269-3286-77"


class Azure(PolledNotices):
    """Microsoft's notices. `FOOTPLATE_AZURE_METADATA` names another address of the server."""

    def __init__(self) -> None:
        self._named = os.environ.get("FOOTPLATE_AZURE_METADATA")
        super().__init__(MetadataServer(self._named or "http://169.254.169.254", ANSWER_S), POLL_S)
        self._name: str | None = None

    def is_present(self) -> bool:
        return bool(self._named) or dmi("chassis_asset_tag") == TAG

    def ask(self) -> str | None:
        """What is going to happen to this machine; None if nothing is."""
        if self._name is None:
            self._name = self._get(NAME)
        try:
            events = json.loads(self._get(EVENTS))["Events"]
            return next((meaning for event in events if (meaning := self._meaning(event))), None)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OSError(f"{self._server.host} answers with something else than scheduled events") from error

    def _meaning(self, event: dict[str, Any]) -> str | None:
        return ENDS.get(event["EventType"]) if self._name in event["Resources"] else None

    def _get(self, path: str) -> str:
        status, text, _ = self._server.ask(path, HEADERS)
        if status != 200:
            raise self._server.refused(status)
        return text
