"""Which of how many processes this one is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from footplate.errors import ConfigError


@dataclass(frozen=True)
class World:
    """The place of this process among the processes of one training.

    Attributes:
        rank: 0 … size-1, over all nodes. Rank 0 logs and saves.
        size: how many processes train together.
        local_rank: 0 … local_size-1, on this node; it chooses the device.
        local_size: how many of them run on this node.
        launched: whether somebody has said so (torchrun, the supervisor, a shell): `WORLD_SIZE` is set.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> World:
        """Read `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` (torchrun's names); without them, a world of one.

        Without the two local ones, all processes are taken to be on this node.

        Raises:
            ConfigError: `WORLD_SIZE` without `RANK`, something that is no number, or a rank outside the world.
        """
        if "WORLD_SIZE" not in environ:
            return cls()
        size = _number(environ, "WORLD_SIZE", 1)
        if size > 1 and "RANK" not in environ:
            raise ConfigError(
                f"WORLD_SIZE={size} is set, but RANK is not, so this process can't know which of them it is. "
                "Start it with torchrun, or set RANK too; unset WORLD_SIZE to train alone."
            )
        rank = _number(environ, "RANK", 0)
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
        """As torch's process group has it, where there is no `RANK` (Lightning makes such); else see `from_environ`."""
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized() or "RANK" in os.environ:
            return cls.from_environ()
        own = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
        return cls.from_environ({**os.environ, **own})


SINGLE = World()


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment: expected a whole number.") from None
