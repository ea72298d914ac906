"""Starts the server: checks the settings, listens, and stops on a signal."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import sys
from pathlib import Path

from footplate.core.errors import ConfigError
from footplate.core.optional import require

PORT = 8650

# Open streams have this long to finish when the server stops.
_GRACE_S = 1


def serve(host: str = "127.0.0.1", port: int = PORT, token_file: Path | None = None) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        host: the address to listen on. Without a token, only loopback addresses are allowed.
        port: the port; 0 chooses a free one.
        token_file: a file with the token; without it, the token comes from FOOTPLATE_TOKEN, if that is set.

    Raises:
        ConfigError: the address needs a token, or can't be listened on; the store can't be used; `FOOTPLATE_CPUS` or
            `FOOTPLATE_MEMORY` isn't a number.
        MissingExtra: FastAPI or uvicorn isn't installed.
        KeyboardInterrupt: Ctrl-C.
    """
    for module in ("fastapi", "uvicorn"):
        require(module, "server", "The server")
    import uvicorn

    from footplate.jobs.backends.local import machine
    from footplate.jobs.home import Home
    from footplate.jobs.redaction import Mask
    from footplate.jobs.store import open_store
    from footplate.server.app import make_app
    from footplate.server.auth import VARIABLE, take
    from footplate.server.deadlines import HeadDeadline
    from footplate.server.dependencies import PATIENCE_S, ServerContext

    token, text = take(token_file)
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: other users could submit programs that run as you. Give a token, in a file (--token-file) "
            f"or in {VARIABLE}, or listen on 127.0.0.1."
        )

    # Report a store or settings that can't be used now, not at the first request.
    home = Home.from_env()
    open_store(home, PATIENCE_S).close()
    machine.resources()

    mask = Mask.of(os.environ, *filter(None, [text]))
    app = make_app(ServerContext(home, mask, local=is_loopback(host)), token)
    listener = _listen(host, port)
    address = f"[{host}]" if ":" in host else host
    print(f"Footplate's jobs: http://{address}:{listener.getsockname()[1]}/", flush=True)
    if not is_loopback(host):
        print(
            "Requests are not encrypted. Put the server behind a proxy with TLS, or use an SSH tunnel.", file=sys.stderr
        )

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = uvicorn.Config(
        app, http=HeadDeadline, log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=_GRACE_S, ws="none",
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listener])


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--host {host} --port {port}: {error}. Choose another port, or 0 for any that is free."
        ) from None
    return listener
