"""The outermost layer of the server: it checks every request before any route, and adds headers to every answer.

A page of another site in the user's browser can send requests here too. These rules reject them:

    rule                                                       against
    `Host` is an address, localhost or this machine's name     a foreign name that points to this server (DNS rebinding)
    `Sec-Fetch-Site` and `Origin` are of this site             a page of another site, as the browser reports it
    a request that changes something has `Authorization`       a form of another site: it can't set a header, and the
      or `X-Footplate`                                         server uses neither cookies nor CORS
    if there is a token, the API requires it                   everybody else

The guard reads a whole body, of up to `BODY` bytes, before the application gets it. Packages are an exception: the
application gets them piece by piece, and their route counts the bytes. A body, or the next piece of a package, must arrive
within `BODY_S`. The headers of every answer forbid the page to load anything from other sites.
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

# The most bytes of a body: a spec with as many arguments as a process can have.
BODY = 3 * 2**20

# The time limit for a body; for a package, from one piece to the next.
BODY_S = 60.0
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
    """A request was refused."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Guard:
    """Wraps an application, and refuses requests that break the rules.

    Args:
        app: the application.
        token: the token that requests must carry; None if there is none.
    """

    def __init__(self, app: App, token: Token | None = None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The other type is "lifespan", for the start and the end of the server. There are no websockets.
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        try:
            check(scope["method"], scope["path"], dict(scope["headers"]), self._token)
            if scope["method"] not in _SAFE:
                receive = _piecewise(receive) if scope["path"] == STREAMED else await _in_time(_whole(receive))
            await self._app(scope, receive, send_with_headers)
        except Refusal as refusal:
            # The last refusals occur while the application reads the body, so it hasn't answered yet.
            await _refuse(refusal, send_with_headers)


def check(method: str, path: str, headers: dict[bytes, bytes], token: Token | None) -> None:
    """Check the rules for a request.

    Raises:
        Refusal: the request breaks a rule.
    """
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if not is_ours(host):
        raise Refusal(
            403,
            "forbidden",
            f'Host "{host[:80]}": expected the address of this server, localhost, or its machine\'s name.',
        )
    if not (path == API or path.startswith(f"{API}/")):
        return
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        raise Refusal(403, "forbidden", "a page of another site sent this request. Open this server's own page.")
    origin = headers.get(b"origin", b"").decode("latin-1").lower()
    if origin and origin.partition("://")[2] != host:
        raise Refusal(403, "forbidden", f'Origin "{origin[:80]}": a page of another site sent this request.')
    if token is not None and not token.allows(headers.get(b"authorization", b"")):
        raise Refusal(401, "unauthorized", "expected the header Authorization: Bearer TOKEN, with this server's token.")
    if method not in _SAFE and not (token or HEADER in headers):
        raise Refusal(
            403,
            "forbidden",
            f"{method} changes something, so it needs the header X-Footplate: 1, which pages of other sites can't send.",
        )


def is_ours(host: str) -> bool:
    """Return True if a `Host` is an address, which can't be redirected, or one of this machine's own names.

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
        raise Refusal(408, "too_slow", f"the body of the request didn't arrive within {BODY_S:g} s.") from None


def _piecewise(receive: Receive) -> Receive:
    """Make a receiver of the pieces of a body, each with a time limit. After the last one it waits for the disconnect."""
    more = True

    async def piece() -> Message:
        nonlocal more
        message = await (_in_time(receive()) if more else receive())
        more = message.get("more_body", False)
        return message

    return piece


async def _whole(receive: Receive) -> Receive:
    """Read a whole body; returns a receiver that gives it to the application."""
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
    delivered = False

    async def replay() -> Message:
        nonlocal delivered
        if delivered:
            return await receive()
        delivered = True
        return {"type": "http.request", "body": b"".join(pieces), "more_body": False}

    return replay


async def _refuse(refusal: Refusal, send: Send) -> None:
    body = json.dumps({"error": {"code": refusal.code, "message": str(refusal), "problems": []}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
