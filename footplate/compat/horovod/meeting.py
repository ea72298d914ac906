"""How the ranks connect to rank 0, on one machine or several.

    every rank → store     which machine it is on
    rank 0 → store         its addresses, its port and two random tokens
    rank r → rank 0        "TOKEN r"        proves that it belongs to this job
    rank 0 → rank r        "ANSWER"         proves that this is rank 0, and not another server with the same address
    rank r → rank 0        "stay"           only now does the connection count

A name such as `localhost` means another machine on each machine. So rank r tries the address at which it has met the
others, where that isn't its own loopback, and then those that rank 0 has published, one after the other. The loopback
interface is used if, and only if, all ranks are on one machine. Whoever connects and doesn't know the token is cut off;
connections that say nothing hold nobody up.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import os
import secrets
import selectors
import socket
import time
from typing import Any

from footplate.compat.horovod.errors import HorovodInternalError
from footplate.launch.cluster.greeting import household

log = logging.getLogger(__name__)

MEET_S = 60.0  # by then the others, who have met already, must have connected
TRY_S = 5.0  # for one address
PAUSE_S = 0.5  # before the next try, when a connection couldn't be accepted
STRANGERS = 256  # connections that are open at a time without having shown the token
_LOOPBACK = "127.0.0.1"
_LINE = 200  # bytes of a greeting at most


def gather(size: int, store: Any) -> dict[int, socket.socket]:
    """Rank 0: wait for the other ranks' connections.

    Raises:
        HorovodInternalError: some have not connected within `MEET_S`.
    """
    here = household("")
    store.set("place/0", here)
    alone = all(store.get(f"place/{rank}").decode() == here for rank in range(1, size))
    tokens = {"token": secrets.token_hex(16), "answer": secrets.token_hex(16)}
    with _listen(alone) as listening:
        addresses = [_LOOPBACK] if alone else _own_addresses()
        store.set("rank0", json.dumps({"addresses": addresses, "port": listening.getsockname()[1], **tokens}))
        return _admit(listening, set(range(1, size)), **tokens)


def reach(rank: int, store: Any) -> socket.socket:
    """Any other rank: connect to rank 0.

    Raises:
        HorovodInternalError: none of its addresses leads there.
    """
    store.set(f"place/{rank}", household(""))
    found = json.loads(store.get("rank0"))
    port, deadline = found["port"], time.monotonic() + MEET_S
    addresses = found["addresses"]
    if addresses != [_LOOPBACK]:
        addresses = list(dict.fromkeys([*_outward(_looked_up(os.environ.get("MASTER_ADDR", ""))), *addresses]))
    failures: dict[str, Exception] = {}
    while addresses and time.monotonic() < deadline:
        for address in addresses:
            try:
                return _greet(rank, address, port, found["token"], found["answer"], deadline)
            except (OSError, ValueError) as error:
                failures[address] = error
        addresses = [one for one in addresses if isinstance(failures[one], TimeoutError)]  # it may only be slow
    text = "; ".join(f"{address}: {error}" for address, error in failures.items())
    raise HorovodInternalError(
        f"Rank {rank} can't connect to rank 0 at port {port} ({text}). Let the machines reach each other at "
        "all TCP ports, and set MASTER_ADDR to an address of rank 0's machine that the others can reach."
    )


def _greet(rank: int, address: str, port: int, token: str, answer: str, deadline: float) -> socket.socket:
    left = max(0.1, min(TRY_S, deadline - time.monotonic()))
    connection = socket.create_connection((address, port), timeout=left)
    try:
        connection.sendall(f"{token} {rank}\n".encode())
        line = b""
        while not line.endswith(b"\n") and len(line) < _LINE and (byte := connection.recv(1)):
            line += byte
        if not hmac.compare_digest(line.strip(), answer.encode()):
            raise ValueError("another program answers there")
        connection.sendall(b"stay\n")
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connection.close()
        raise
    return connection


def _admit(listening: socket.socket, missing: set[int], token: str, answer: str) -> dict[int, socket.socket]:
    """Accept connections until each missing rank has one that it stays with.

    When this process has no file descriptor left, connections wait in the socket's queue for `PAUSE_S`.
    """
    deadline = time.monotonic() + MEET_S
    admitted: dict[int, socket.socket] = {}
    heard: dict[socket.socket, bytes] = {}  # of connections that don't count yet: what they have said
    greeted: dict[socket.socket, int] = {}  # of these, the ranks of those that have shown the token
    accept_again_at: float | None = None  # None while connections are accepted
    warned = False
    listening.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)

        def drop(connection: socket.socket) -> None:
            selector.unregister(connection)
            heard.pop(connection)
            greeted.pop(connection, None)
            connection.close()

        try:
            while missing - admitted.keys():
                left = deadline - time.monotonic()
                if left <= 0:
                    late = ", ".join(str(rank) for rank in sorted(missing - admitted.keys()))
                    raise HorovodInternalError(
                        f"Ranks that have not connected to rank 0 within {MEET_S:.0f} s: {late}."
                    )
                if accept_again_at is not None:
                    left = min(left, accept_again_at - time.monotonic())
                    if left <= 0:
                        accept_again_at = None
                        selector.register(listening, selectors.EVENT_READ)
                for key, _ in selector.select(max(0.0, left)):
                    connection: Any = key.fileobj
                    if connection is listening:
                        try:
                            connection, _ = listening.accept()
                        except (BlockingIOError, ConnectionError):  # it has gone already
                            continue
                        except OSError as error:  # mostly too many open files; select would report it again at once
                            if not warned:
                                log.warning("rank 0 can't accept connections of other ranks: %s", error)
                            warned, accept_again_at = True, time.monotonic() + PAUSE_S
                            selector.unregister(listening)
                            continue
                        connection.setblocking(False)
                        heard[connection] = b""
                        selector.register(connection, selectors.EVENT_READ)
                        if len(heard) - len(greeted) > STRANGERS:
                            drop(next(one for one in heard if one not in greeted))
                        continue
                    if connection not in heard:  # dropped just now, to make room
                        continue
                    line = _more_of_a_line(connection, heard[connection])
                    if line is None:
                        drop(connection)
                    elif not line.endswith(b"\n"):
                        heard[connection] = line
                    elif connection in greeted:
                        rank = greeted[connection]
                        selector.unregister(connection)
                        heard.pop(connection)
                        greeted.pop(connection)
                        connection.setblocking(True)
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        admitted[rank] = connection
                    elif (rank := _rank_of(line, token, missing)) is None:
                        drop(connection)
                    else:
                        heard[connection], greeted[connection] = b"", rank
                        try:
                            connection.sendall(f"{answer}\n".encode())
                        except OSError:
                            drop(connection)
        except BaseException:
            for connection in admitted.values():
                connection.close()
            raise
        finally:
            for connection in heard:
                connection.close()
    return admitted


def _more_of_a_line(connection: socket.socket, line: bytes) -> bytes | None:
    """What a connection has said up to the end of a line, and no byte beyond; None if it has ended or says too much."""
    try:
        while not line.endswith(b"\n"):
            byte = connection.recv(1)
            if not byte or len(line) >= _LINE:
                return None
            line += byte
    except BlockingIOError:
        pass
    except OSError:
        return None
    return line


def _rank_of(line: bytes, token: str, ranks: set[int]) -> int | None:
    """The rank that a greeting names, if it shows the token."""
    shown, _, rank = line.strip().partition(b" ")
    if not hmac.compare_digest(shown, token.encode()) or not rank.isdigit():
        return None
    return int(rank) if int(rank) in ranks else None


def _listen(alone: bool) -> socket.socket:
    if alone:
        return socket.create_server((_LOOPBACK, 0), backlog=socket.SOMAXCONN)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=socket.SOMAXCONN, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=socket.SOMAXCONN)


def _own_addresses() -> list[str]:
    """The addresses of this machine by which others may reach it; those of its name come first."""
    import psutil

    inet = (socket.AF_INET, socket.AF_INET6)
    mine = [one.address for every in psutil.net_if_addrs().values() for one in every if one.family in inet]
    of_name = [address for address in _looked_up(socket.gethostname()) if address in mine]
    return list(dict.fromkeys(_outward([*of_name, *sorted(mine, key=lambda address: ":" in address)])))


def _outward(addresses: list[str]) -> list[str]:
    """The addresses that mean the same machine on every machine."""
    known = [(address, ipaddress.ip_address(address.partition("%")[0])) for address in addresses]
    return [address for address, one in known if not (one.is_loopback or one.is_link_local or one.is_unspecified)]


def _looked_up(name: str) -> list[str]:
    if not name:
        return []
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []
