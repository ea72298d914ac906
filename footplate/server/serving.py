"""A server from its settings: what it listens on, who may ask, and that it ends when it is told to."""

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
_GRACE_S = 1  # for streams that are open when it ends


def serve(host: str = "127.0.0.1", port: int = PORT, token_file: Path | None = None) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        host: the address to listen on; one of this machine alone, unless there is a token.
        port: 0 for one that is free.
        token_file: a file with the token; without, FOOTPLATE_TOKEN has it, if there is one.

    Raises:
        ConfigError: others could ask without a token; the address can't be listened on; the store can't be used;
            `FOOTPLATE_CPUS` or `FOOTPLATE_MEMORY` is no number.
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
    from footplate.server.desk import PATIENCE_S, Desk

    token, text = take(token_file)
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: others could submit programs that run as you. Give a token, in a file (--token-file) or in "
            f"{VARIABLE}, or listen on 127.0.0.1."
        )
    home = Home.from_env()
    open_store(home, PATIENCE_S).close()
    machine.resources()  # a wrong FOOTPLATE_CPUS or FOOTPLATE_MEMORY is an error now, not at the first request
    mask = Mask.of(os.environ, *filter(None, [text]))
    app = make_app(Desk(home, mask, local=is_loopback(host)), token)
    listening = _listen(host, port)
    at = f"[{host}]" if ":" in host else host
    print(f"Footplate's jobs: http://{at}:{listening.getsockname()[1]}/", flush=True)
    if not is_loopback(host):
        print("What is sent to it is not encrypted: put it behind a proxy with TLS, or an SSH tunnel.", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = uvicorn.Config(
        app, http=HeadDeadline, log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=_GRACE_S, ws="none",
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listening])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(128)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--host {host} --port {port}: {error}. Choose another port, or 0 for any that is free."
        ) from None
    return made
