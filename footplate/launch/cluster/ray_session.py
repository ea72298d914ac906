"""Which Ray cluster this process is to use, and whether it is alive, before workers are placed there (`ray.py`).

The cluster is the one that the process is connected to; else the one at `address`, `RAY_ADDRESS`, or running on this
machine; else one that is started here. A connection is kept for the next launch, and a Ray that is started here ends with
the process; nobody else's Ray is ever shut down.

Whoever asks Ray to reach a cluster that has died waits for minutes, and in its own code, where no signal is heeded. So its
head is asked first, in `ANSWER_S` and by ourselves: it is a gRPC server, and such a one answers the first bytes of a
connection by HTTP/2 at once.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from footplate.core.errors import LaunchError
from footplate.core.optional import require

ANSWER_S = 5.0
LOOPBACK = "127.0.0.1"

_QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
_SETTINGS = 4  # the type of the frame that both sides of a connection by HTTP/2 begin with
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])


def connect(address: str | None) -> tuple[Any, str]:
    """Ray, connected to a cluster, and the address by which that can reach this process.

    Raises:
        LaunchError: there is none at the address, it doesn't answer, or it can't be used from here.
        MissingExtra: Ray is not installed.
    """
    ray = require("ray", "ray", 'backend="ray"')
    given = address or os.environ.get("RAY_ADDRESS")
    if (given or "").startswith("ray://"):
        raise LaunchError(
            f"address={given!r} is one for Ray Client, whose program isn't in the cluster, so workers can't reach it. Run "
            'the program on a node of the cluster, with address="auto", or submit it with `ray job submit`.'
        )
    if ray.is_initialized():
        _check_connected(ray, address)
        return ray, ray.util.get_node_ip_address()
    there = _running_here() if given in (None, "auto") else given
    if there is None and given is None:
        ray.init(address="local", include_dashboard=False, **_QUIET)
        return ray, LOOPBACK
    there = there or "auto"
    try:
        check_alive(there)
        ray.init(address=there, **_QUIET)
    except (OSError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f'No Ray cluster can be used at "{there}": {" ".join(str(error).split())}. Start one with `ray start --head`, '
            "or correct address= or RAY_ADDRESS. This machine must be one of its nodes. What is left here of one that has "
            "died, `ray stop` removes."
        ) from error
    return ray, ray.util.get_node_ip_address()


def check_alive(address: str) -> None:
    """See that the head of a cluster answers; addresses without a port ("auto", "local") are Ray's own to judge.

    Raises:
        OSError: nothing answers, or something that is no head.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return  # that something listens must do
        connection.sendall(_HELLO)
        try:
            answer = connection.recv(9)
        except TimeoutError:
            raise TimeoutError(f"what listens there has said nothing for {ANSWER_S:g} s") from None
    if answer[3:4] != bytes([_SETTINGS]):
        raise ConnectionError("what listens there is not Ray")


def _running_here() -> str | None:
    """The address of the cluster that Ray takes for the one of this machine; None if it knows of none."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address("auto")
    except ConnectionError:
        return None


def _check_connected(ray: Any, address: str | None) -> None:
    """A process has one connection: refuse another cluster than that of the one it has, and one that has died."""
    here = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", "local", here):
        raise LaunchError(
            f'address="{address}": this process is connected to the Ray at {here} already. Leave address out, or call '
            "ray.shutdown() before."
        )
    try:
        check_alive(here)
    except OSError as error:
        raise LaunchError(
            f"The Ray at {here}, to which this process is connected, doesn't answer any more: {error}. Call "
            "ray.shutdown(), and connect to another one."
        ) from error
