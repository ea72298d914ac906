"""Several processes that run one program: one process on each machine, which drives all devices of the machine.

    torchrun --nnodes=4 --nproc-per-node=1 train.py        Trainer(accelerator="tpu", devices=4)

torchrun's variables tell the processes, as for any accelerator. The processes rendezvous twice:

1. Through torch (gloo), for exchanges between hosts: the forms of batches, metrics at the end of an epoch, signals,
   saves.
2. Through JAX, whose devices then form one mesh over all processes. On CPUs, JAX's collectives use gloo too, on the
   same network interface (`distributed/network_interface.py`).

JAX's coordinator is the first process, at `JAX_COORDINATOR_ADDRESS`, or at torch's `MASTER_ADDR`: one port above
`MASTER_PORT`, or another port if that one is taken. The first process tells the others the port through torch's store.
(A coordinator that doesn't get its port ends in a segmentation fault.)

Every process makes the same calls for the same forms of batches, each with its share of the rows; see
`batch_exchange.py`.

When a process dies, its connections close, and the next call of the others raises. If it was the first process, JAX
aborts the others (SIGABRT) within a second. If a machine is gone, JAX's coordinator notices after a hundred seconds;
then all processes are aborted.

A process that has ended waits for the others in JAX's exit handler. It waits for half an hour, since JAX then aborts
all processes that still work (the first one may have a model to upload). A process that ends by an exception waits only
`PARTING_S`. If the others raise too, they end in that time. Then the process exits, so that the others notice.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from footplate.core.errors import ConfigError
from footplate.distributed import network_interface
from footplate.distributed.group import TIMEOUT, not_met
from footplate.distributed.world import World

# JAX waits as long for processes at the beginning.
MEET = timedelta(minutes=5)
PARTING_S = 10.0

# Torch's store. If the first process dropped it, the connections of the others would break.
_store: Any = None


def coordinator(environ: Mapping[str, str], agree: Callable[[int], int]) -> str:
    """The address of JAX's coordinator, in the first process.

    Args:
        environ: the environment variables.
        agree: returns the common port for a preferred port. All processes call it.

    Raises:
        ConfigError: neither JAX's variable nor torchrun's are set.
    """
    if "JAX_COORDINATOR_ADDRESS" in environ:
        return environ["JAX_COORDINATOR_ADDRESS"]
    try:
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise ConfigError(
            "WORLD_SIZE is above 1, but the address of the rendezvous is missing: set MASTER_ADDR and "
            "MASTER_PORT as torchrun does (JAX takes the port above), or JAX_COORDINATOR_ADDRESS=host:port too."
        ) from None
    return f"[{address}]:{agree(port + 1)}" if ":" in address else f"{address}:{agree(port + 1)}"


def join(jax: Any, environ: Mapping[str, str]) -> None:
    """Rendezvous with the other processes, once, before JAX starts. A single process does nothing."""
    world = World.from_environ(environ)
    if world.size == 1 or jax.distributed.is_initialized():
        return
    # The service would catch SIGTERM instead of us, and do nothing.
    if hasattr(jax.config, "jax_enable_preemption_service"):
        jax.config.update("jax_enable_preemption_service", False)
    address = coordinator(environ, lambda port: _agreed(world, port, environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    jax.distributed.initialize(address, world.size, world.rank, shutdown_timeout_seconds=int(TIMEOUT.total_seconds()))
    _choose_interface(jax, network_interface.for_gloo(world, environ))
    ending = threading.Event()
    parting = threading.Thread(target=_part, args=(ending,), name="footplate-part", daemon=True)
    # The thread starts now, since no thread can start at the end of a program. The handler runs before JAX's own, which
    # was registered earlier.
    parting.start()
    atexit.register(_end, ending, parting)


def _choose_interface(jax: Any, interface: str | None) -> None:
    """Set the network interface of JAX's CPU collectives. JAX's own choice is the interface of the host's name."""
    if interface is None or jax.config.jax_cpu_collectives_implementation != "gloo":
        return
    from jax._src import distributed, xla_bridge
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    def client() -> Any:
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, interface=interface)
        return xla_bridge.make_cpu_client(collectives=gloo)

    xla_bridge.register_backend_factory("cpu", client, priority=0, fail_quietly=False)


def _end(ending: threading.Event, parting: threading.Thread) -> None:
    """End the program: after an exception, wait for the others only briefly."""
    if getattr(sys, "last_value", None) is None:
        return
    ending.set()
    parting.join(PARTING_S)
    if parting.is_alive():
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)


def _part(ending: threading.Event) -> None:
    from jax._src import distributed

    ending.wait()
    state = distributed.global_state
    client: Any = state.client
    # The others report their own failures.
    with contextlib.suppress(Exception):
        client.shutdown()
    state.client = None


def free_port(preferred: int) -> int:
    """A free port: the preferred one, or any."""
    for port in (preferred, 0):
        try:
            with _listening(port) as listener:
                return listener.getsockname()[1]
        except (OSError, OverflowError):
            continue
    return preferred


def _listening(port: int) -> socket.socket:
    """A listening socket on all interfaces, as JAX's coordinator opens it."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _agreed(world: World, preferred: int, attempt: str) -> int:
    """The port that the first process chooses, told to every process."""
    global _store
    from torch.distributed.rendezvous import rendezvous

    try:
        _store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=MEET))
    except (ValueError, RuntimeError) as error:
        raise not_met(world, error, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True") from error
    key = f"footplate/jax/{attempt}"
    if world.rank == 0:
        _store.set(key, str(free_port(preferred)))
    return int(_store.get(key))
