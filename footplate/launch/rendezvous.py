"""How the ranks of one attempt on one machine find each other.

The supervisor binds a socket to a free port of the loopback interface and hands it to rank 0, which hosts the store on it;
the others connect, and wait in the socket's queue if they come too early. So the port can't be taken by somebody else in
between, and as each attempt has its own, nothing of an earlier one can be found in the store.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from footplate.launch.crew import Attempt

HOST = "127.0.0.1"


def listen(world_size: int) -> socket.socket:
    """The socket of an attempt."""
    return socket.create_server((HOST, 0), backlog=max(128, 2 * world_size))


def environment(attempt: Attempt, rank: int, port: int) -> dict[str, str]:
    """What tells a worker its place, in torchrun's words and ours."""
    size = str(len(attempt.slots))
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there: torch is only to connect to it
        "FOOTPLATE_ATTEMPT": str(attempt.number),
        "FOOTPLATE_SLOT": str(attempt.slots[rank]),
    }
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        place["GLOO_SOCKET_IFNAME"] = loopback.pop()  # all are here: not by a network that may go away
    return place


def host_store(listening: int) -> Any:
    """Host the store on the socket with this descriptor, in the process that is rank 0; it lasts as long as the object."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening)
