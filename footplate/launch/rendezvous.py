"""How the ranks of one attempt find each other.

A socket is bound to a free port and handed to rank 0, which hosts the store on it; the others connect, and wait in the
socket's queue if they come too early. So the port can't be taken by somebody else in between, and as each attempt has its
own, nothing of an earlier one can be found in the store.

With all ranks on one machine that is the loopback interface. Of an attempt over several machines, each carries a `Share`:
the one with rank 0 binds the socket, and the others are told where.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from footplate.launch import roles
from footplate.launch.crew import Attempt

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Share:
    """What one machine carries of an attempt.

    Attributes:
        attempt: which.
        ranks: those that live here; the index is the local rank.
        store: address and port of the store that rank 0 hosts.
        address: of this machine, by which the others reach it.
        node: this machine's number among those of the attempt.
        environment: variables for the workers here, over the launch's.
        devices: of each of its ranks, which of the machine's devices is its own; empty for the first ones.
        tasks: of each rank of the attempt, an address at which a server of its own may listen; empty if not known.
    """

    attempt: Attempt
    ranks: tuple[int, ...]
    store: tuple[str, int]
    address: str = HOST
    node: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()


def listen(host: str, world_size: int) -> socket.socket:
    """The socket of an attempt."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=max(128, 2 * world_size))


def free_addresses(host: str, count: int) -> tuple[str, ...]:
    """So many addresses of this machine that nobody listens at now."""
    with contextlib.ExitStack() as held:
        found = [held.enter_context(listen(host, 1)) for _ in range(count)]
        return tuple(f"{host}:{one.getsockname()[1]}" for one in found)


def environment(share: Share, rank: int) -> dict[str, str]:
    """What tells a worker its place, in torchrun's words and ours."""
    attempt, local_rank = share.attempt, share.ranks.index(rank)
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(len(attempt.slots)),
        "LOCAL_WORLD_SIZE": str(len(share.ranks)),
        "GROUP_RANK": str(share.node),
        "NODE_RANK": str(share.node),
        "MASTER_ADDR": share.store[0],
        "MASTER_PORT": str(share.store[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there: torch is only to connect to it
        "TORCHELASTIC_RUN_ID": "footplate",  # by which Lightning knows that its processes are there
        "TORCHELASTIC_RESTART_COUNT": str(attempt.number),
        "FOOTPLATE_ATTEMPT": str(attempt.number),
        "FOOTPLATE_SLOT": str(share.devices[local_rank] if share.devices else local_rank),
    }
    own = interface(share.address)
    if own and "GLOO_SOCKET_IFNAME" not in os.environ:
        place["GLOO_SOCKET_IFNAME"] = own
    return {**place, **roles.environment(share.tasks, rank), **share.environment}


def host_store(listening: int) -> Any:
    """Host the store on the socket with this descriptor, in the process that is rank 0; it lasts as long as the object."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening)


def interface(address: str) -> str | None:
    """The network interface with this address. If all are on one machine it is the loopback, which doesn't go away."""
    if address == HOST:
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    import psutil

    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if address in {one.address for one in addresses}), None)
