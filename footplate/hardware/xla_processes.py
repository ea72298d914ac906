"""Several processes that run one program: one on each machine, driving all devices of it.

    torchrun --nnodes=4 --nproc-per-node=1 train.py        Trainer(accelerator="tpu", devices=4)

Who is there is said by torchrun's variables, as for any accelerator, and the processes meet twice: through torch (gloo),
for what hosts tell each other (the forms of batches, metrics at the end of an epoch, signals, saves), and through JAX,
whose devices then form one mesh over all of them. Of CPUs, JAX's collectives go over gloo, too, on the same network
interface (`distributed/network_interface.py`). JAX's coordinator is the first process, at `JAX_COORDINATOR_ADDRESS`, or
else at torch's `MASTER_ADDR`: one port above `MASTER_PORT`, or, where that is taken, another, which the first process tells
the others through torch's store. (A coordinator that doesn't get its port ends in a segmentation fault.)

Every process makes the same calls for the same forms of batches, each with its share of the rows; see `batch_exchange.py`.

When one dies, its connections close, and what the others next ask of it raises. If it was the first, JAX aborts them
(SIGABRT) within a second. A silent one, whose machine is gone, JAX's coordinator misses after a hundred seconds: then all
are aborted.

A process that has ended waits for the others in JAX's exit handler: for half an hour, since JAX then aborts whoever is
still at work (the first one may have a model to upload). One that ends by an exception waits `PARTING_S`, in which the
others end too if they have raised as well; then it goes, so that they notice.
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
from footplate.distributed.group import TIMEOUT
from footplate.distributed.world import World

MEET = timedelta(minutes=5)  # as long as JAX waits for processes at the beginning
PARTING_S = 10.0

_store: Any = None  # torch's; if the first process let go of it, the others' connections to it would break


def coordinator(environ: Mapping[str, str], agree: Callable[[int], int]) -> str:
    """Where JAX in the other processes finds the first one.

    Args:
        environ: variables.
        agree: gives the port for one that is wished for; all processes call it.

    Raises:
        ConfigError: neither JAX's variable nor torchrun's are set.
    """
    if "JAX_COORDINATOR_ADDRESS" in environ:
        return environ["JAX_COORDINATOR_ADDRESS"]
    try:
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise ConfigError(
            "WORLD_SIZE says that several processes train together, but not where they meet: set MASTER_ADDR and "
            "MASTER_PORT as torchrun does (JAX takes the port above), or JAX_COORDINATOR_ADDRESS=host:port too."
        ) from None
    return f"[{address}]:{agree(port + 1)}" if ":" in address else f"{address}:{agree(port + 1)}"


def join(jax: Any, environ: Mapping[str, str]) -> None:
    """Meet the other processes, once, before JAX starts; of a single one, nothing."""
    world = World.from_environ(environ)
    if world.size == 1 or jax.distributed.is_initialized():
        return
    if hasattr(jax.config, "jax_enable_preemption_service"):  # it would hear SIGTERM in our place, and do nothing
        jax.config.update("jax_enable_preemption_service", False)
    address = coordinator(environ, lambda port: _agreed(world, port, environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    jax.distributed.initialize(address, world.size, world.rank, shutdown_timeout_seconds=int(TIMEOUT.total_seconds()))
    _choose_interface(jax, network_interface.for_gloo(world, environ))
    ending = threading.Event()
    parting = threading.Thread(target=_part, args=(ending,), name="footplate-part", daemon=True)
    parting.start()  # now, since at the end of a program no thread can be started
    atexit.register(_end, ending, parting)  # before JAX's own handler, which was registered earlier


def _choose_interface(jax: Any, interface: str | None) -> None:
    """Have the CPUs of several processes meet on a network interface; JAX would take what the host's name leads to."""
    if interface is None or jax.config.jax_cpu_collectives_implementation != "gloo":
        return
    from jax._src import distributed, xla_bridge
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    def client() -> Any:
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, interface=interface)
        return xla_bridge.make_cpu_client(collectives=gloo)

    xla_bridge.register_backend_factory("cpu", client, priority=0, fail_quietly=False)


def _end(ending: threading.Event, parting: threading.Thread) -> None:
    """At the end of the program: after an exception, don't wait for the others for long."""
    if getattr(sys, "last_value", None) is None:
        return
    ending.set()
    parting.join(PARTING_S)
    if parting.is_alive():
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)  # as Python does after an exception


def _part(ending: threading.Event) -> None:
    from jax._src import distributed

    ending.wait()
    state = distributed.global_state
    client: Any = state.client
    with contextlib.suppress(Exception):  # the others' failures, which they tell themselves
        client.shutdown()
    state.client = None


def free_port(wished: int) -> int:
    """A port that nobody listens at: the one that is wished for, or any."""
    for port in (wished, 0):
        try:
            with _listening(port) as found:
                return found.getsockname()[1]
        except (OSError, OverflowError):
            continue
    return wished


def _listening(port: int) -> socket.socket:
    """A socket as JAX's coordinator will have it, on all interfaces."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _agreed(world: World, wished: int, attempt: str) -> int:
    """The port that the first process chooses, in every process."""
    global _store
    from torch.distributed.rendezvous import rendezvous

    try:
        _store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=MEET))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"Rank {world.rank} could not meet the other {world.size - 1} rank(s): {str(error).splitlines()[0]} "
            "Set MASTER_ADDR and MASTER_PORT to where rank 0 can be reached, as torchrun does."
        ) from error
    key = f"footplate/jax/{attempt}"
    if world.rank == 0:
        _store.set(key, str(free_port(wished)))
    return int(_store.get(key))
