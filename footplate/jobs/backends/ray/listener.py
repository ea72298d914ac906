"""Speaks with the cluster in a thread of its own, so that the supervisor never waits for a network.

    submit, unless it is there ──► hear its output, and ask every few seconds how it is ──► it has ended, or is unknown

Each time that the connection breaks, it begins anew, after a pause, with the job's output from its very beginning (`Anew`):
whoever takes it knows what he has already. While nothing can be reached, nothing is said, and nothing is concluded.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from footplate.core.errors import FootplateError
from footplate.jobs.backends.ray.client import Away, Client, Info, Refused

log = logging.getLogger(__name__)

LOOK_S = 0.25
ASK_S = 5.0  # between two questions how the job is
SILENT_S = 120.0  # of a driver that says something every 30 s: then the connection is taken for dead
END_S = 15.0  # that the output of a job that has ended may still take
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Anew:
    """The output follows from its beginning."""


@dataclass(frozen=True)
class Output:
    """A piece of the output."""

    text: str


@dataclass(frozen=True)
class Over:
    """The job has ended, and all of its output was passed on."""

    info: Info


@dataclass(frozen=True)
class Unknown:
    """The cluster doesn't know the job any more."""


@dataclass(frozen=True)
class NotTaken:
    """The cluster doesn't take the job, or it can't be sent; `text` says why."""

    text: str


Heard = Anew | Output | Over | Unknown | NotTaken


class Listener:
    """The thread. What it hears is in `heard`.

    Args:
        address: of the Jobs API.
        key: of the job.
        arguments: makes those of its submission; None if it was submitted before.
        submitted: is called once the cluster has the job.
    """

    def __init__(
        self,
        address: str,
        key: str,
        arguments: Callable[[], Mapping[str, Any]] | None,
        submitted: Callable[[], None],
    ) -> None:
        self.heard: queue.Queue[Heard] = queue.Queue(1000)
        self.trouble = ""
        self._client = Client(address)
        self._key = key
        self._arguments = arguments
        self._submitted = submitted
        self._closed = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ray-{key}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Have the job ended, as soon as the cluster can be reached."""
        self._stop.set()

    def close(self) -> None:
        """Hear no more. The job goes on."""
        self._closed.set()
        self._thread.join(1.0)  # it may be waiting for the network

    def _run(self) -> None:
        pause_s = 1.0
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                last = self._begin() or asyncio.run(self._listen())
            except Refused as error:
                self._say(NotTaken(f"Ray doesn't take it: {error}"))
                return
            except FootplateError as error:  # of what was to be sent
                self._say(NotTaken(str(error)))
                return
            except Exception as error:  # mostly `Away`; whatever it is, that the job has ended only the cluster can say
                if time.monotonic() - began > LONGEST_PAUSE_S:
                    pause_s = 1.0
                self.trouble = str(error) or type(error).__name__
                log.warning("%s: %r; once more in %g s", self._client.address, error, pause_s)
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                if last is not None:
                    self._say(last)
                return

    def _begin(self) -> Heard | None:
        """See that the cluster has the job; what is to be said if it hasn't."""
        if self._client.info(self._key) is None:
            if self._arguments is None:
                return Unknown()
            if self._stop.is_set():
                return Over(Info("STOPPED", "it was never submitted"))
            self._client.submit(self._arguments())
        self._arguments = None
        self._submitted()
        return None

    async def _listen(self) -> Heard | None:
        """Hear the job to its end; None if nobody listens any more."""
        self._say(Anew())
        self._heard_at = asked = time.monotonic()
        output, told = asyncio.create_task(self._pass_on()), False
        try:
            while not self._closed.is_set():
                await asyncio.wait([output], timeout=LOOK_S)
                if self._stop.is_set() and not told:
                    await asyncio.to_thread(self._client.stop, self._key)
                    told = True
                if not output.done() and time.monotonic() - asked < ASK_S:
                    continue
                asked = time.monotonic()
                info = await asyncio.to_thread(self._client.info, self._key)
                self.trouble = ""
                if info is None:
                    return Unknown()
                if info.ended:
                    return await self._end(output, info)
                if output.done():
                    output.result()
                    raise Away("the connection to its output has ended")
                if info.status == "RUNNING" and time.monotonic() - self._heard_at > SILENT_S:
                    raise Away(f"nothing was heard for {SILENT_S:g} s")
        finally:
            output.cancel()
            await asyncio.gather(output, return_exceptions=True)
        return None

    async def _end(self, output: asyncio.Task[None], info: Info) -> Heard:
        """The job has ended: the rest of its output, or all of it once more if the rest doesn't come."""
        await asyncio.wait([output], timeout=END_S)
        if not output.done() or output.exception() is not None:
            output.cancel()
            self._say(Anew())
            self._say(Output(await asyncio.to_thread(self._client.whole_output, self._key)))
        return Over(info)

    async def _pass_on(self) -> None:
        async for piece in self._client.output(self._key):
            self._heard_at = time.monotonic()
            while not await asyncio.to_thread(self._offer, Output(piece)):
                if self._closed.is_set():
                    return

    def _offer(self, what: Heard) -> bool:
        try:
            self.heard.put(what, timeout=LOOK_S)
        except queue.Full:
            return False
        return True

    def _say(self, what: Heard) -> None:
        while not self._closed.is_set() and not self._offer(what):
            pass
