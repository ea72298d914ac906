"""The rendezvous of one attempt, in which its ranks find each other.

A socket is bound to a free port and handed to rank 0, which hosts the store on it. The other ranks connect, and wait in
the socket's queue if they are early. So no other process can take the port in between. Each attempt has its own socket, so
the store has nothing of an earlier attempt.

The store needs torch. With all ranks on one machine, rank 0 hosts it once a rank has connected and rank 0's function has
imported torch. So a function that doesn't use torch, such as one that uses TensorFlow, runs without it. Of several
machines, each connects once to check the address, so rank 0 imports torch and hosts the store at once.

With all ranks on one machine, the socket is on the loopback interface. Of an attempt on several machines, each machine
runs a `Share`: the one with rank 0 binds the socket, and the driver tells the others its address.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from footplate.distributed import network_interface
from footplate.launch.worker_group import Attempt

HOST = "127.0.0.1"
NCCL = "NCCL_SOCKET_IFNAME"
IMPORT_POLL_S = 0.02


@dataclass(frozen=True)
class Share:
    """One machine's share of an attempt.

    Attributes:
        attempt: the attempt.
        ranks: the ranks that run here; the index is the local rank.
        store: address and port of the store that rank 0 hosts.
        address: of this machine, for the other machines.
        node: this machine's number among those of the attempt.
        environment: variables for the workers here, over the launch's.
        devices: for each of its ranks, the index of its device on the machine; empty for the first ones.
        tasks: for each rank of the attempt, an address at which a server of its own may listen; empty if not known.
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
    """Open the socket of an attempt, on a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=max(128, 2 * world_size))


def own_address(default: str) -> str:
    """The address at which other machines reach this one: that of the interface in `FOOTPLATE_INTERFACE`, or `default`.

    Raises:
        ConfigError: this machine has no such interface.
    """
    interface = network_interface.chosen(os.environ)
    return network_interface.address_of(interface) or default if interface else default


def free_addresses(host: str, count: int) -> tuple[str, ...]:
    """Find addresses of this machine at which no process listens now."""
    with contextlib.ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(listen(host, 1)) for _ in range(count)]
        return tuple(f"{host}:{listening.getsockname()[1]}" for listening in sockets)


def environment(share: Share, rank: int) -> dict[str, str]:
    """Variables with a worker's ranks, under torchrun's names and ours."""
    attempt, local_rank = share.attempt, share.ranks.index(rank)
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(len(attempt.slots)),
        "LOCAL_WORLD_SIZE": str(len(share.ranks)),
        "GROUP_RANK": str(share.node),
        "NODE_RANK": str(share.node),
        "MASTER_ADDR": share.store[0],
        "MASTER_PORT": str(share.store[1]),
        # The store exists already. torch only connects to it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # This tells Lightning that its processes were started already.
        "TORCHELASTIC_RUN_ID": "footplate",
        "TORCHELASTIC_RESTART_COUNT": str(attempt.number),
        "FOOTPLATE_ATTEMPT": str(attempt.number),
        "FOOTPLATE_SLOT": str(share.devices[local_rank] if share.devices else local_rank),
    }
    interface = network_interface.with_address(share.address)
    if interface and network_interface.VARIABLE not in os.environ:
        variables[network_interface.VARIABLE] = interface
    if share.address != HOST and os.environ.get(network_interface.CHOICE) and NCCL not in os.environ:
        variables[NCCL] = os.environ[network_interface.CHOICE]
    return {**variables, **task_environment(share.tasks, rank), **share.environment}


def task_environment(tasks: Sequence[str], rank: int) -> dict[str, str]:
    """`TF_CONFIG` and `CLUSTER_SPEC`: variables that tell a rank its role, for TensorFlow and for Google's training jobs.

    Rank 0 is the chief (`workerpool0`), the other ranks are workers (`workerpool1`). Each has an address of its own for its
    TensorFlow server; torch doesn't use them. Without addresses, there are no variables.

    >>> task_environment(["a:1", "b:2"], 1)["TF_CONFIG"]
    '{"cluster": {"chief": ["a:1"], "worker": ["b:2"]}, "task": {"type": "worker", "index": 0}}'
    """
    if not tasks:
        return {}
    return {
        "TF_CONFIG": json.dumps(_tasks_and_own(tasks, rank, "chief", "worker")),
        "CLUSTER_SPEC": json.dumps(_tasks_and_own(tasks, rank, "workerpool0", "workerpool1")),
    }


def _tasks_and_own(tasks: Sequence[str], rank: int, first: str, rest: str) -> dict[str, object]:
    """All tasks of the cluster, and a rank's own."""
    cluster = {first: [tasks[0]]}
    if len(tasks) > 1:
        cluster[rest] = list(tasks[1:])
    task = {"type": rest, "index": rank - 1} if rank else {"type": first, "index": 0}
    return {"cluster": cluster, "task": task}


def host_store(listening: int) -> list[Any]:
    """Host the store on the socket with this descriptor, at once or when it is needed.

    Returns:
        A list that gets the store. Rank 0 keeps it.
    """
    hosted: list[Any] = []
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def begin() -> None:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        hosted.append(TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening))

    def begin_when_needed() -> None:
        select.select([listening], [], [])
        # This thread doesn't import torch: while the function imports it too, each import would wait for the other.
        while not _has_imported_torch():
            time.sleep(IMPORT_POLL_S)
        begin()

    on_one_machine = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    if _has_imported_torch() or not on_one_machine:
        begin()
    else:
        threading.Thread(target=begin_when_needed, name="footplate-store", daemon=True).start()
    return hosted


def _has_imported_torch() -> bool:
    """Return True if an import of torch in this process has ended."""
    torch = sys.modules.get("torch")
    # Python's own import looks at this attribute, too.
    return torch is not None and not getattr(torch.__spec__, "_initializing", False)
