"""Can the ranks of several machines connect to each other? Found out before gloo tries, which waits half an hour.

A firewall may leave the port of rank 0's store open and close all others. Each rank listens on a port that the system
chooses, as gloo will, and connects to the next one:

    rank r    store: reach/r = host, address, port      listens
              connects to reach/(r + 1)                 the store gets what went wrong, if anything did
              waits for the last rank's word            all ranks raise the same error, or go on

So each machine is tried by at least one other, at the cost of one connection for each rank.
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
HEAR_S = 10.0
_GREETING = b"footplate"


def prepare_gloo(world: World, store: Any) -> None:
    """With several machines: choose the network interface on which gloo meets, and let every rank connect to the next one.

    Args:
        world: this process's place.
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
        store: torch's, which all ranks reach; its keys are those of this meeting alone.
        rank: this process's.
        size: how many ranks there are.
        address: at which the others reach this rank; None where that isn't known, and this rank isn't tried.

    Raises:
        ConfigError: some rank can't connect to the next one; all ranks raise it.
    """
    with _listening(address) as port:
        store.set(f"reach/{rank}", json.dumps([socket.gethostname(), address, port]))
        other = (rank + 1) % size
        host, theirs, their_port = json.loads(store.get(f"reach/{other}"))
        fault = None if theirs is None else _fault(theirs, their_port)
        if fault is not None:
            store.set(
                "reach/fault",
                f"Rank {rank} on {socket.gethostname()} can't connect to rank {other} on {host}, at {theirs} port "
                f"{their_port}: {fault}. Ranks on several machines connect to each other on ports that the system "
                "chooses. Let the machines' firewalls pass TCP between them, or name another network interface on each "
                f"({network_interface.VARIABLE}).",
            )
        if store.add("reach/tried", 1) == size:
            failed = store.check(["reach/fault"])
            store.set("reach/over", store.get("reach/fault") if failed else "")
        said = store.get("reach/over").decode()
    if said:
        _let_all_hear(store, rank, size)
        raise ConfigError(said)


def _let_all_hear(store: Any, rank: int, size: int) -> None:
    """Keep rank 0, whose process has the store, until the others have read what went wrong."""
    heard, until = store.add("reach/heard", 1), time.monotonic() + HEAR_S
    while rank == 0 and heard < size and time.monotonic() < until:
        time.sleep(0.05)
        heard = store.add("reach/heard", 0)


@contextlib.contextmanager
def _listening(address: str | None) -> Iterator[int]:
    """Listen on a port that the system chooses, and greet each connection. Gives the port; without an address, 0."""
    if address is None:
        yield 0
        return
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)

    def greet() -> None:
        with contextlib.suppress(OSError):  # the listener has been closed
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(_GREETING)

    thread = threading.Thread(target=greet, name="footplate-reach", daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        listener.close()
        thread.join()


def _fault(address: str, port: int) -> str | None:
    """Why a rank can't be reached; None if it can."""
    try:
        with socket.create_connection((address, port), CONNECT_S) as connection, connection.makefile("rb") as stream:
            found = stream.read(len(_GREETING))
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None if found == _GREETING else "something else answers there"
