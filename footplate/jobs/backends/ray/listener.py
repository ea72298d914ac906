"""A thread that talks to the cluster, so that the supervisor never waits for a network.

    submit, unless it is there ──► read its output, and ask for its state every few seconds ──► it has ended, or is unknown

After each broken connection it starts again, after a pause, with the job's output from the beginning (`Restart`). The
receiver knows what it has already. While the cluster can't be reached, the thread reports nothing and concludes nothing.
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

POLL_S = 0.25
# Between two questions for the job's state.
ASK_S = 5.0
# The entry point writes something every 30 s. After this silence the connection counts as dead.
SILENT_S = 120.0
# The time that the rest of the output may take after the job has ended.
END_S = 15.0
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Restart:
    """The output follows again from its beginning."""


@dataclass(frozen=True)
class Output:
    """A piece of the output."""

    text: str


@dataclass(frozen=True)
class Over:
    """The job has ended, and all of its output was reported."""

    info: Info


@dataclass(frozen=True)
class Unknown:
    """The cluster no longer knows the job."""


@dataclass(frozen=True)
class NotTaken:
    """The cluster refuses the job, or it can't be sent; `text` says why."""

    text: str


Heard = Restart | Output | Over | Unknown | NotTaken


class Listener:
    """The thread. It puts what it hears into `heard`.

    Args:
        address: the address of the Jobs API.
        key: the job's key.
        arguments: makes the arguments of the submission; None if the job was submitted before.
        submitted: is called when the cluster has the job.
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
        """End the job as soon as the cluster can be reached."""
        self._stop.set()

    def close(self) -> None:
        """Stop listening. The job goes on."""
        self._closed.set()
        # The thread may be waiting for the network.
        self._thread.join(1.0)

    def _run(self) -> None:
        pause_s = 1.0
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                last = self._begin() or asyncio.run(self._listen())
            except Refused as error:
                self._say(NotTaken(f"Ray refuses it: {error}"))
                return
            except FootplateError as error:
                # The job can't be sent.
                self._say(NotTaken(str(error)))
                return
            except Exception as error:
                # Usually `Away`. Only the cluster knows whether the job has ended.
                if time.monotonic() - began > LONGEST_PAUSE_S:
                    pause_s = 1.0
                self.trouble = str(error) or type(error).__name__
                log.warning("%s: %r; retry in %g s", self._client.address, error, pause_s)
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                if last is not None:
                    self._say(last)
                return

    def _begin(self) -> Heard | None:
        """Submit the job, unless the cluster has it. Returns what to report if the cluster doesn't have it."""
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
        """Follow the job until it ends. Returns None if the listener was closed."""
        self._say(Restart())
        self._heard_at = asked = time.monotonic()
        output, stopped = asyncio.create_task(self._pass_on()), False
        try:
            while not self._closed.is_set():
                await asyncio.wait([output], timeout=POLL_S)
                if self._stop.is_set() and not stopped:
                    await asyncio.to_thread(self._client.stop, self._key)
                    stopped = True
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
                    raise Away(f"nothing was received for {SILENT_S:g} s")
        finally:
            output.cancel()
            await asyncio.gather(output, return_exceptions=True)
        return None

    async def _end(self, output: asyncio.Task[None], info: Info) -> Heard:
        """Report the rest of an ended job's output, or all of it again if the rest doesn't come."""
        await asyncio.wait([output], timeout=END_S)
        if not output.done() or output.exception() is not None:
            output.cancel()
            self._say(Restart())
            self._say(Output(await asyncio.to_thread(self._client.whole_output, self._key)))
        return Over(info)

    async def _pass_on(self) -> None:
        async for piece in self._client.output(self._key):
            self._heard_at = time.monotonic()
            while not await asyncio.to_thread(self._offer, Output(piece)):
                if self._closed.is_set():
                    return

    def _offer(self, event: Heard) -> bool:
        try:
            self.heard.put(event, timeout=POLL_S)
        except queue.Full:
            return False
        return True

    def _say(self, event: Heard) -> None:
        while not self._closed.is_set() and not self._offer(event):
            pass
