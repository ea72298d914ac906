"""Which requests come through, and what every answer says: the outermost layer, before any route.

A web page that the user has open elsewhere can send requests here, too. It is kept out by these:

    rule                                                       against
    `Host` is an address, localhost or this machine's name     a foreign name that was made to lead here (DNS rebinding)
    the API's `Sec-Fetch-Site`, `Origin` are of this site      another site's page, as browsers say themselves
    what changes something has `Authorization`                 another site's form: it can't set a header, and there are
      or `X-Footplate`                                         neither cookies nor CORS here
    with a token, the API wants it                             everybody else

A body is read whole before the application sees it, up to `BODY` bytes; only packages are passed on as they come, and
their route counts them. A body, or the next piece of a package, must come within `BODY_S`. Each answer says that nothing
but what comes from here may be loaded into the page.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from typing import Any, TypeVar

from footplate.server.auth import Token

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_T = TypeVar("_T")
App = Callable[[Scope, Receive, Send], Awaitable[None]]

API = "/api"
HEADER = b"x-footplate"
BODY = 3 * 2**20  # bytes: a spec, and as many arguments of its program as a process can be given
BODY_S = 60.0  # for a body; of a package, from one piece to the next
STREAMED = f"{API}/packages"
_SAFE = ("GET", "HEAD", "OPTIONS")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


class Refusal(Exception):
    """A request that doesn't come through."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Guard:
    """Around an application. Args: `app`; `token`, if there is one."""

    def __init__(self, app: App, token: Token | None = None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a start, an end; nothing here speaks websocket
            await self._app(scope, receive, send)
            return

        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        try:
            check(scope["method"], scope["path"], dict(scope["headers"]), self._token)
            if scope["method"] not in _SAFE:
                receive = _piecewise(receive) if scope["path"] == STREAMED else await _in_time(_whole(receive))
            await self._app(scope, receive, signed)
        except Refusal as refusal:  # at the latest while the application reads the body, so before any answer
            await _refuse(refusal, signed)


def check(method: str, path: str, headers: dict[bytes, bytes], token: Token | None) -> None:
    """Let a request pass.

    Raises:
        Refusal: it must not.
    """
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if not is_ours(host):
        raise Refusal(
            403, "forbidden", f'Host "{host[:80]}": this server goes by its address, localhost, or the machine\'s name.'
        )
    if not (path == API or path.startswith(f"{API}/")):
        return
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        raise Refusal(403, "forbidden", "a page of another site has asked: open this server's own page.")
    origin = headers.get(b"origin", b"").decode("latin-1").lower()
    if origin and origin.partition("://")[2] != host:
        raise Refusal(403, "forbidden", f'Origin "{origin[:80]}": a page of another site has asked.')
    if token is not None and not token.allows(headers.get(b"authorization", b"")):
        raise Refusal(401, "unauthorized", "expected the header Authorization: Bearer TOKEN, with this server's token.")
    if method not in _SAFE and not (token or HEADER in headers):
        raise Refusal(
            403,
            "forbidden",
            f"{method} changes something: expected the header X-Footplate: 1, which no other site can send.",
        )


def is_ours(host: str) -> bool:
    """Whether a `Host` is an address, which nobody can make lead elsewhere, or one of this machine's own names.

    >>> is_ours("127.0.0.1:8650"), is_ours("[::1]:8650"), is_ours("localhost"), is_ours("evil.example")
    (True, True, True, False)
    """
    name = host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name.strip("[]"))
        return True
    except ValueError:
        return name == "localhost" or name in _names()


@cache
def _names() -> tuple[str, ...]:
    return tuple({name.lower() for name in (socket.gethostname(), socket.getfqdn()) if name})


async def _in_time(awaited: Awaitable[_T]) -> _T:
    try:
        return await asyncio.wait_for(awaited, BODY_S)
    except TimeoutError:
        raise Refusal(408, "too_slow", f"the request's body has not come within {BODY_S:g} s.") from None


def _piecewise(receive: Receive) -> Receive:
    """What gives the pieces of a body as they come, each in time. Afterwards it waits for the client to go."""
    more = True

    async def piece() -> Message:
        nonlocal more
        message = await (_in_time(receive()) if more else receive())
        more = message.get("more_body", False)
        return message

    return piece


async def _whole(receive: Receive) -> Receive:
    """Read a body, and return what gives it again."""
    pieces, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        more = message.get("more_body", False)
        if size > BODY:
            raise Refusal(413, "too_large", f"the request has more than {BODY:,} bytes.")
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": b"".join(pieces), "more_body": False}

    return again


async def _refuse(refusal: Refusal, send: Send) -> None:
    body = json.dumps({"error": {"code": refusal.code, "message": str(refusal), "problems": []}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
