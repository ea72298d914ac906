"""The contract of a cloud's notices, the threads that wait for them, and requests to a metadata server."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from footplate.core.threads import join
from footplate.hardware.machine import system_text

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPMessage

log = logging.getLogger("footplate.training.preemption")

RETRY_S = 1.0
JOIN_S = 5.0
MAX_ANSWER_BYTES = 1 << 20
DMI = Path("/sys/class/dmi/id")

Watch = Callable[[], str | None]


class Notices(ABC):
    """The notices of one cloud."""

    @abstractmethod
    def is_present(self) -> bool:
        """Return True on a machine of this cloud. Asks no server."""

    @abstractmethod
    def watches(self) -> list[Watch]:
        """Return functions that each wait for a notice, a minute at most, and return the reason, or None.

        They raise OSError if the cloud can't be asked.
        """

    @abstractmethod
    def close(self) -> None:
        """Make waiting functions return or raise at once, and later calls too."""


class MetadataServer:
    """Requests to a cloud's metadata server, which `close` ends, also if they wait for an answer.

    Args:
        address: where it is: `http://169.254.169.254`, or without `http://`.
        timeout_s: the longest time for an answer.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        self.host = parts.netloc
        self._path = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._asking: set[HTTPConnection] = set()
        self.closed = threading.Event()

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> tuple[int, str, HTTPMessage]:
        """Return the status, the text and the headers of an answer.

        Raises:
            OSError: the server can't be reached, or `close` was called.
        """
        from http.client import HTTPConnection

        with contextlib.closing(HTTPConnection(self.host, timeout=self._timeout_s)) as connection:
            connection.connect()
            self._asking.add(connection)
            try:
                # `close` ran before this connection was made.
                if self.closed.is_set():
                    raise OSError("closed")
                connection.request(method, self._path + path, headers=dict(headers))
                answer = connection.getresponse()
                text = answer.read(MAX_ANSWER_BYTES).decode(errors="replace").strip()
                return answer.status, text, answer.headers
            finally:
                self._asking.discard(connection)

    def refused(self, status: int) -> OSError:
        """The error for an answer that isn't one."""
        from http import HTTPStatus

        try:
            phrase = HTTPStatus(status).phrase
        except ValueError:
            phrase = ""
        return OSError(f"{self.host} answers {status} {phrase}".rstrip())

    def close(self) -> None:
        """End the requests that wait for an answer."""
        self.closed.set()
        for connection in tuple(self._asking):
            # The socket may be closed at this moment.
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)


class PolledNotices(Notices):
    """The notices of a cloud whose metadata server is asked again and again.

    Args:
        server: the metadata server.
        poll_s: the seconds between two questions.
    """

    def __init__(self, server: MetadataServer, poll_s: float) -> None:
        self._server = server
        self._poll_s = poll_s

    @abstractmethod
    def ask(self) -> str | None:
        """Ask the server now. Returns the reason to end the run; None if there is none."""

    def watches(self) -> list[Watch]:
        pauses = itertools.chain([0.0], itertools.repeat(self._poll_s))
        return [lambda: None if self._server.closed.wait(next(pauses)) else self.ask()]

    def close(self) -> None:
        self._server.close()


def dmi(name: str) -> str:
    """What the firmware says about the machine, such as its `sys_vendor`; empty if it has none."""
    return system_text(DMI / name)


@contextlib.contextmanager
def watching_clouds(clouds: Sequence[Notices], end: Callable[[str], None]) -> Iterator[None]:
    """Call `end(reason)` in a thread at the first notice of one of the clouds, inside a `with` block."""
    over = threading.Event()
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


def _watch(wait: Watch, end: Callable[[str], None], over: threading.Event) -> None:
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
