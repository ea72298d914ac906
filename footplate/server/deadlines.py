"""How long a client may take to send the head of a request: `HEAD_S` from the connection, or from the last answer.

A connection that stays silent, or sends a byte now and then, would hold a file descriptor for ever. `guard.py` limits how
long a body may take. Nothing limits how long an answer may take: `/wait` and `/events` are meant to be long.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0


class HeadDeadline(H11Protocol):
    """HTTP/1.1 that closes a connection whose next request is late."""

    head_s = HEAD_S
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        else:
            self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete  # a request that came with the last one
        if self._late is None and not answering and not self.transport.is_closing():
            self._late = self.loop.call_later(self.head_s, self.transport.close)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
