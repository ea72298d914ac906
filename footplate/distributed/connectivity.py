"""Check that the ranks of several machines can connect to each other, before gloo tries, which waits for half an hour.

A firewall may leave the port of rank 0's store open and close all others. Each rank listens on a port that the system
chooses, as gloo will, and connects to the next rank:

    rank r    store: reach/r = host, address, port      listens
              connects to reach/(r + 1)                 writes the error into the store, if there is one
              waits for the last rank's word            all ranks raise the same error, or continue

So at least one other rank tries each machine, at the cost of one connection for each rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from footplate.core.errors import ConfigError
from footplate.distributed import network_interface
from footplate.distributed.world import World

CONNECT_S = 20.0
# Time for the other ranks to read the error.
READ_S = 10.0
_BANNER = b"footplate"


def prepare_gloo(world: World, store: Any) -> None:
    """With several machines, choose the network interface for gloo, and let every rank connect to the next one.

    Args:
        world: this process's ranks.
        store: see `check`.

    Raises:
        ConfigError: some rank can't connect to the next one; all ranks raise it.
    """
    if world.size == world.local_size:
        return
    address = None
    if interface := network_interface.for_gloo(world, os.environ):
        os.environ[network_interface.VARIABLE] = interface
        address = network_interface.address_of(interface)
    check(store, world.rank, world.size, address)


def check(store: Any, rank: int, size: int, address: str | None) -> None:
    """Let every rank connect to the next one. All ranks call it.

    Args:
        store: a store of torch that all ranks reach; its keys must be used for this check only.
        rank: this process's rank.
        size: the number of ranks.
        address: at which the other ranks reach this one; None if it isn't known. Then no rank tries to connect here.

    Raises:
        ConfigError: some rank can't connect to the next one; all ranks raise it.
    """
    with _listening(address) as port:
        store.set(f"reach/{rank}", json.dumps([socket.gethostname(), address, port]))
        other = (rank + 1) % size
        host, theirs, their_port = json.loads(store.get(f"reach/{other}"))
        problem = None if theirs is None else _why_unreachable(theirs, their_port)
        if problem is not None:
            store.set(
                "reach/fault",
                f"Rank {rank} on {socket.gethostname()} can't connect to rank {other} on {host}, at {theirs} port "
                f"{their_port}: {problem}. Ranks on several machines connect to each other on ports that the system "
                "chooses. Let the machines' firewalls pass TCP between them, or set another network interface on each "
                f"({network_interface.VARIABLE}).",
            )
        if store.add("reach/tried", 1) == size:
            failed = store.check(["reach/fault"])
            store.set("reach/over", store.get("reach/fault") if failed else "")
        error = store.get("reach/over").decode()
    if error:
        _wait_for_readers(store, rank, size)
        raise ConfigError(error)


def _wait_for_readers(store: Any, rank: int, size: int) -> None:
    """Keep rank 0, whose process has the store, until the other ranks have read the error."""
    readers, until = store.add("reach/heard", 1), time.monotonic() + READ_S
    while rank == 0 and readers < size and time.monotonic() < until:
        time.sleep(0.05)
        readers = store.add("reach/heard", 0)


@contextlib.contextmanager
def _listening(address: str | None) -> Iterator[int]:
    """Listen on a port that the system chooses, and send a banner on each connection.

    Yields the port; 0 without an address.
    """
    if address is None:
        yield 0
        return
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)

    def serve() -> None:
        # This rank closes the listener at the end.
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(_BANNER)

    thread = threading.Thread(target=serve, name="footplate-reach", daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            # Wake the thread that waits in `accept`.
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _why_unreachable(address: str, port: int) -> str | None:
    """The reason why a rank can't be reached; None if it can."""
    try:
        with socket.create_connection((address, port), CONNECT_S) as connection, connection.makefile("rb") as stream:
            banner = stream.read(len(_BANNER))
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None if banner == _BANNER else "another program answers there"
