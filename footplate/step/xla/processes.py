"""Several processes that run one program: one on each machine, driving all devices of it.

    torchrun --nnodes=4 --nproc-per-node=1 train.py        Trainer(accelerator="tpu", devices=4)

Who is there is said by torchrun's variables, as for any accelerator, and the processes meet twice: through torch (gloo),
for what hosts tell each other (metrics at the end of an epoch, signals, saves), and through JAX, whose devices then form
one mesh over all of them. JAX's coordinator is the first process, at `JAX_COORDINATOR_ADDRESS`, or else at torch's
`MASTER_ADDR`, one port above `MASTER_PORT`.

Every process makes the same calls with the same forms of batches, each with its share of the rows. When one dies, JAX's
coordinator misses its heartbeats; nothing of ours starts it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from footplate.errors import ConfigError
from footplate.parallel.world import World


def coordinator(environ: Mapping[str, str]) -> str:
    """Where JAX in the other processes finds the first one.

    Raises:
        ConfigError: neither JAX's variable nor torchrun's are set.
    """
    if "JAX_COORDINATOR_ADDRESS" in environ:
        return environ["JAX_COORDINATOR_ADDRESS"]
    try:
        return f"{environ['MASTER_ADDR']}:{int(environ['MASTER_PORT']) + 1}"
    except (KeyError, ValueError):
        raise ConfigError(
            "WORLD_SIZE says that several processes train together, but not where they meet: set MASTER_ADDR and "
            "MASTER_PORT as torchrun does (JAX takes the port above), or JAX_COORDINATOR_ADDRESS=host:port too."
        ) from None


def join(jax: Any, environ: Mapping[str, str]) -> None:
    """Meet the other processes, once, before JAX starts; of a single one, nothing."""
    world = World.from_environ(environ)
    if world.size > 1 and not jax.distributed.is_initialized():
        jax.distributed.initialize(coordinator(environ), world.size, world.rank)
