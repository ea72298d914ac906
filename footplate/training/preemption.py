"""Notices of clouds that a machine is about to be taken away, watched for while a run trains.

A notice is treated as SIGTERM is: the step is finished, the run saved, the process ends with 143, and whatever started it
starts it again somewhere else. A cloud is one subclass of `Notices`: whether this machine is its, and a call that waits
for the next word from it.

On Google's Compute Engine the metadata server answers two questions (https://cloud.google.com/compute/docs/metadata):
`instance/preempted` becomes TRUE thirty seconds before a spot machine is stopped, and `instance/maintenance-event` becomes
TERMINATE_ON_HOST_MAINTENANCE an hour before a machine that can't be moved, one with a GPU or TPU, is. A machine that is
moved while it runs (MIGRATE_ON_HOST_MAINTENANCE) trains on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.core.threads import join

if TYPE_CHECKING:
    from http.client import HTTPConnection

log = logging.getLogger(__name__)

RETRY_S = 1.0
JOIN_S = 5.0


class Notices(ABC):
    """Where one cloud announces the end of a machine."""

    @abstractmethod
    def here(self) -> bool:
        """Whether this machine is one of that cloud's; asks no server."""

    @abstractmethod
    def watches(self) -> list[Callable[[], str | None]]:
        """Functions that each wait for a word (a minute at most) and return what ends the machine, or None.

        They raise OSError where the cloud can't be asked just now.
        """

    @abstractmethod
    def close(self) -> None:
        """Let functions that wait return or raise at once, and those that are called later."""


class ComputeEngine(Notices):
    """Google's metadata server; `GCE_METADATA_HOST` names another host and port, as for Google's own tools."""

    WAIT_S = 60
    PRODUCT = Path("/sys/class/dmi/id/product_name")

    def __init__(self) -> None:
        self._asking: set[HTTPConnection] = set()
        self._closed = False

    def here(self) -> bool:
        if os.environ.get("GCE_METADATA_HOST"):
            return True
        try:
            return self.PRODUCT.read_text().strip() in ("Google", "Google Compute Engine")
        except OSError:
            return False

    def watches(self) -> list[Callable[[], str | None]]:
        known: dict[str, str] = {}

        def watch(name: str, ends: tuple[str, ...], meaning: str) -> str | None:
            etag = known.get(name, "0")
            value, known[name] = self._ask(
                f"instance/{name}?wait_for_change=true&timeout_sec={self.WAIT_S}&last_etag={etag}"
            )
            return meaning if value in ends else None

        return [
            lambda: watch("preempted", ("TRUE",), "this machine is being preempted"),
            lambda: watch(
                "maintenance-event", ("TERMINATE_ON_HOST_MAINTENANCE",), "this machine is being stopped for maintenance"
            ),
        ]

    def _ask(self, path: str) -> tuple[str, str]:
        from http.client import HTTPConnection

        host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
        with contextlib.closing(HTTPConnection(host, timeout=self.WAIT_S + 10)) as connection:
            connection.connect()
            self._asking.add(connection)
            try:
                if self._closed:  # `close` looked for connections before this one was there
                    raise OSError("no longer asked")
                connection.request("GET", f"/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"})
                answer = connection.getresponse()
                if answer.status != 200:
                    raise OSError(f"{host} answers {answer.status} {answer.reason}")
                return answer.read().decode().strip(), answer.headers.get("ETag", "0")
            finally:
                self._asking.discard(connection)

    def close(self) -> None:
        """End the requests that wait for an answer."""
        self._closed = True
        for connection in tuple(self._asking):
            with contextlib.suppress(OSError, AttributeError):  # it may be closed at this moment
                connection.sock.shutdown(socket.SHUT_RDWR)


CLOUDS: tuple[type[Notices], ...] = (ComputeEngine,)


@contextlib.contextmanager
def watching(end: Callable[[str], None]) -> Iterator[None]:
    """While entered, call `end(reason)`, in a thread, when the cloud says that this machine will be taken away."""
    over = threading.Event()
    clouds = [cloud for cloud in (kind() for kind in CLOUDS) if cloud.here()]
    threads = [
        threading.Thread(target=_watch, args=(wait, end, over), name="footplate-notices", daemon=True)
        for cloud in clouds
        for wait in cloud.watches()
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for cloud in clouds:
            cloud.close()
        for thread in threads:
            join(thread, JOIN_S, "it asks the cloud whether this machine will be taken away")


def _watch(wait: Callable[[], str | None], end: Callable[[str], None], over: threading.Event) -> None:
    from http.client import HTTPException

    quiet = False
    while not over.is_set():
        try:
            reason = wait()
        except (OSError, HTTPException) as error:
            if not quiet and not over.is_set():
                log.warning(
                    "The cloud can't be asked whether this machine will be taken away (%s); asking again.", error
                )
            quiet = True
            over.wait(RETRY_S)
            continue
        quiet = False
        if reason is not None and not over.is_set():
            log.warning("The cloud says: %s. The run is saved and ended.", reason)
            end(reason)
            return
