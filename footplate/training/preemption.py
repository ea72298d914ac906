"""A cloud's notices that it will take a machine away, watched while a run trains.

A notice counts as SIGTERM: the loop finishes the step, saves the run, and exits with 143. Its supervisor then starts it
on another machine. A subclass of `Notices` covers one cloud: it recognises the cloud's machines, and waits for the
next notice.

On Google's Compute Engine, the metadata server has two values (https://cloud.google.com/compute/docs/metadata).
`instance/preempted` becomes TRUE thirty seconds before a spot machine is stopped. `instance/maintenance-event` becomes
TERMINATE_ON_HOST_MAINTENANCE an hour before a machine with a GPU or TPU is stopped. A machine that is moved while it runs
(MIGRATE_ON_HOST_MAINTENANCE) trains on.
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
    """The notices of one cloud."""

    @abstractmethod
    def is_present(self) -> bool:
        """Return True on a machine of this cloud. Asks no server."""

    @abstractmethod
    def watches(self) -> list[Callable[[], str | None]]:
        """Return functions that each wait for a notice, a minute at most, and return the reason, or None.

        They raise OSError if the cloud can't be asked.
        """

    @abstractmethod
    def close(self) -> None:
        """Make waiting functions return or raise at once, and later calls too."""


class ComputeEngine(Notices):
    """Google's metadata server. `GCE_METADATA_HOST` names another host and port, as for Google's own tools."""

    WAIT_S = 60
    PRODUCT = Path("/sys/class/dmi/id/product_name")

    def __init__(self) -> None:
        self._asking: set[HTTPConnection] = set()
        self._closed = False

    def is_present(self) -> bool:
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
                # `close` ran before this connection was made.
                if self._closed:
                    raise OSError("closed")
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
            # The socket may be closed at this moment.
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)


CLOUDS: tuple[type[Notices], ...] = (ComputeEngine,)


@contextlib.contextmanager
def watching(end: Callable[[str], None]) -> Iterator[None]:
    """Call `end(reason)` in a thread when the cloud announces the end of this machine, inside a `with` block."""
    over = threading.Event()
    clouds = [cloud for cloud in (kind() for kind in CLOUDS) if cloud.is_present()]
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
                    "The cloud doesn't answer whether this machine will be taken away (%s). Asking again.", error
                )
            quiet = True
            over.wait(RETRY_S)
            continue
        quiet = False
        if reason is not None and not over.is_set():
            log.warning("Notice from the cloud: %s. The run is saved and ended.", reason)
            end(reason)
            return
