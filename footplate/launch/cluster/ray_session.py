"""The connection to a Ray cluster, and a check that it is alive, before workers are placed there (`ray.py`).

The cluster is the one that the process is connected to; else the one at `address`, at `RAY_ADDRESS`, or running on this
machine; else one that is started here. The connection is kept for the next launch. A Ray that is started here ends with
the process. Footplate never shuts down a Ray that it hasn't started.

A connection attempt of Ray to a dead cluster takes minutes, in Ray's own code, where no signal is handled. So this file
asks the head itself first, and waits `ANSWER_S`. The head is a gRPC server, which answers the first bytes of an HTTP/2
connection at once.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from typing import Any

from footplate.core.errors import LaunchError
from footplate.core.optional import require

log = logging.getLogger(__name__)

ANSWER_S = 5.0
LOOK_S = 0.5
LOOPBACK = "127.0.0.1"

_QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
# The type of the first frame on both sides of an HTTP/2 connection.
_SETTINGS = 4
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])


def connect(address: str | None) -> tuple[Any, str]:
    """Connect Ray to a cluster; return Ray, and the address at which the cluster can reach this process.

    Raises:
        LaunchError: there is no cluster at the address, it doesn't answer, or this process can't use it.
        MissingExtra: Ray is not installed.
    """
    ray = require("ray", "ray", 'backend="ray"')
    chosen = address or os.environ.get("RAY_ADDRESS")
    if (chosen or "").startswith("ray://"):
        raise LaunchError(
            f"address={chosen!r} is for Ray Client. Its program runs outside the cluster, where workers can't reach it. "
            'Run the program on a node of the cluster, with address="auto", or submit it with `ray job submit`.'
        )
    if ray.is_initialized():
        _check_connected(ray, address)
        return ray, ray.util.get_node_ip_address()
    head = _running_here() if chosen in (None, "auto") else chosen
    if head is None and chosen is None:
        ray.init(address="local", include_dashboard=False, **_QUIET)
        return ray, LOOPBACK
    head = head or "auto"
    try:
        check_alive(head)
        ray.init(address=head, **_QUIET)
    except (OSError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f'No Ray cluster can be used at "{head}": {" ".join(str(error).split())}. Start one with `ray start --head`, '
            "or correct address= or RAY_ADDRESS. This machine must be one of its nodes. `ray stop` removes what a "
            "dead cluster has left."
        ) from error
    return ray, ray.util.get_node_ip_address()


def check_alive(address: str) -> None:
    """Check that the head of a cluster answers. Ray itself checks addresses without a port ("auto", "local").

    Raises:
        OSError: nothing answers, or something else than Ray.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            # With TLS, only the open port can be checked.
            return
        connection.sendall(_HTTP2_PREFACE)
        try:
            answer = connection.recv(9)
        except TimeoutError:
            raise TimeoutError(f"what listens there has sent nothing for {ANSWER_S:g} s") from None
    if answer[3:4] != bytes([_SETTINGS]):
        raise ConnectionError("what listens there is not Ray")


def wait_for_head(ray: Any, within_s: float) -> str:
    """Wait for the head of the cluster that this process is connected to, if it doesn't answer.

    Ray's own calls wait for a lost head for a minute each, and may then end the process.

    Returns:
        Why it doesn't answer, as a sentence without a full stop; empty if it does.
    """
    address = ray.get_runtime_context().gcs_address
    until, warned = time.monotonic() + within_s, False
    while True:
        try:
            check_alive(address)
        except OSError as error:
            problem = f"The head of the Ray cluster at {address} doesn't answer any more: {error}"
        else:
            return ""
        if time.monotonic() >= until:
            return problem
        if not warned:
            log.warning("%s. Waiting for it", problem)
            warned = True
        time.sleep(LOOK_S)


def report_errors_without_ray() -> None:
    """Print uncaught exceptions as Python does. Ray's hook asks the head first, and prints nothing without it."""
    if sys.excepthook.__module__.startswith("ray."):
        sys.excepthook = sys.__excepthook__


def _running_here() -> str | None:
    """The address of the cluster that runs on this machine, according to Ray; None if there is none."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address("auto")
    except ConnectionError:
        return None


def _check_connected(ray: Any, address: str | None) -> None:
    """Refuse another cluster than the one that this process is connected to, and a cluster that has died."""
    current = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", "local", current):
        raise LaunchError(
            f'address="{address}": this process is connected to the Ray at {current} already. Leave address out, or call '
            "ray.shutdown() before."
        )
    try:
        check_alive(current)
    except OSError as error:
        raise LaunchError(
            f"The Ray at {current}, to which this process is connected, doesn't answer any more: {error}. Call "
            "ray.shutdown(), and connect to another one."
        ) from error
