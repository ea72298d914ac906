"""Which of how many processes this one is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The place of this process among the processes of one training.

    Attributes:
        rank: 0 … size-1, over all nodes. Rank 0 logs and saves.
        size: how many processes train together.
        local_rank: 0 … local_size-1, on this node; it chooses the device.
        local_size: how many of them run on this node.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> World:
        """Read `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` (torchrun's names); without them, a world of one."""
        return cls(
            rank=int(environ.get("RANK", 0)),
            size=int(environ.get("WORLD_SIZE", 1)),
            local_rank=int(environ.get("LOCAL_RANK", 0)),
            local_size=int(environ.get("LOCAL_WORLD_SIZE", 1)),
        )
