"""The time limit for the head of a request: `HEAD_S` from the connection, or from the last answer.

Without it, a connection that sends nothing, or a byte now and then, would hold a file descriptor without limit. `guard.py`
limits the time of a body. There is no limit for an answer, because answers of `/wait` and `/events` take long.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0


class HeadDeadline(H11Protocol):
    """HTTP/1.1 that closes a connection if the head of its next request is late."""

    head_s = HEAD_S
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_timer()
        else:
            self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        # The client may have sent the next request together with the last one.
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._timer is None and not answering and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.head_s, self.transport.close)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
