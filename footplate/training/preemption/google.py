"""Google's Compute Engine.

Its metadata server has two values (https://cloud.google.com/compute/docs/metadata). `instance/preempted` becomes TRUE
thirty seconds before a spot machine is stopped. `instance/maintenance-event` becomes TERMINATE_ON_HOST_MAINTENANCE an hour
before a machine with a GPU or TPU is stopped. A machine that is moved while it runs (MIGRATE_ON_HOST_MAINTENANCE) trains
on.

A request waits on the server until the value changes.
"""

from __future__ import annotations

import os

from footplate.training.preemption.notices import MetadataServer, Notices, Watch, dmi

WAIT_S = 60


class ComputeEngine(Notices):
    """Google's notices. `GCE_METADATA_HOST` names another host and port, as for Google's own tools."""

    def __init__(self) -> None:
        self._server = MetadataServer(os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal", WAIT_S + 10)

    def is_present(self) -> bool:
        return bool(os.environ.get("GCE_METADATA_HOST")) or dmi("product_name") in ("Google", "Google Compute Engine")

    def watches(self) -> list[Watch]:
        known: dict[str, str] = {}

        def watch(name: str, ends: str, meaning: str) -> str | None:
            value, known[name] = self._wait_for_change(name, known.get(name, "0"))
            return meaning if value == ends else None

        return [
            lambda: watch("preempted", "TRUE", "this machine is being preempted"),
            lambda: watch(
                "maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "this machine is being stopped for maintenance"
            ),
        ]

    def close(self) -> None:
        self._server.close()

    def _wait_for_change(self, name: str, etag: str) -> tuple[str, str]:
        """Return a value when it isn't that of the tag any more, and its tag."""
        path = f"/computeMetadata/v1/instance/{name}?wait_for_change=true&timeout_sec={WAIT_S}&last_etag={etag}"
        status, text, headers = self._server.ask(path, {"Metadata-Flavor": "Google"})
        if status != 200:
            raise self._server.refused(status)
        return text, headers.get("ETag", "0")
