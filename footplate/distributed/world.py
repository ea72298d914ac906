"""Rank and world size of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from footplate.core.errors import ConfigError


@dataclass(frozen=True)
class World:
    """Rank and world size of a process in one training.

    Attributes:
        rank: 0 … size-1, over all nodes. Rank 0 logs and saves.
        size: the number of processes that train together.
        local_rank: 0 … local_size-1, on this node; it chooses the device.
        local_size: the number of these processes on this node.
        launched: whether a launcher (torchrun, the supervisor, a shell) has set `WORLD_SIZE`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> World:
        """Read `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` (torchrun's names); without them, a world of one.

        Without the two local variables, all processes are on this node. Launchers for Lightning set `NODE_RANK` and
        `LOCAL_RANK` instead of `RANK`; the rank follows from these.

        Raises:
            ConfigError: `WORLD_SIZE` without a rank, a value that is no number, or a rank outside the world.
        """
        if "WORLD_SIZE" not in environ:
            return cls()
        size = _number(environ, "WORLD_SIZE", 1)
        rank = _number(environ, "RANK", 0) if size == 1 or "RANK" in environ else _rank_on_node(environ, size)
        local_size = _number(environ, "LOCAL_WORLD_SIZE", size)
        local_rank = _number(environ, "LOCAL_RANK", rank % max(1, local_size))
        if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
            raise ConfigError(
                f"RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size}: expected a rank "
                "below the size of its world, and no more processes on this node than in all."
            )
        return cls(rank, size, local_rank, local_size, launched=True)

    @classmethod
    def present(cls) -> World:
        """Read torch's process group if `RANK` isn't set; else see `from_environ`."""
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized() or "RANK" in os.environ:
            return cls.from_environ()
        own = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
        return cls.from_environ({**os.environ, **own})


SINGLE = World()


def _rank_on_node(environ: Mapping[str, str], size: int) -> int:
    """Compute the rank from the node's number and the local rank. Every node has the same number of processes.

    Raises:
        ConfigError: one of the variables is not set.
    """
    if "LOCAL_RANK" in environ and "NODE_RANK" in environ:
        node, local_rank = _number(environ, "NODE_RANK", 0), _number(environ, "LOCAL_RANK", 0)
        # The number of processes on each node doesn't matter here.
        if node == 0:
            return local_rank
        if "LOCAL_WORLD_SIZE" in environ:
            return node * _number(environ, "LOCAL_WORLD_SIZE", size) + local_rank
        raise ConfigError(
            f"NODE_RANK={node} and LOCAL_RANK={local_rank} are set, but neither RANK nor LOCAL_WORLD_SIZE is. Set RANK, "
            "or set LOCAL_WORLD_SIZE to the number of processes on each node."
        )
    raise ConfigError(
        f"WORLD_SIZE={size} is set, but RANK is not, so this process can't know which of them it is. "
        "Start it with torchrun, or set RANK too (or NODE_RANK, LOCAL_RANK and LOCAL_WORLD_SIZE); unset WORLD_SIZE to "
        "train alone."
    )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment: expected a whole number.") from None
