"""The contract of a placement, which starts agents on the machines of a cluster: Ray (`ray.py`), Spark (`spark.py`).

An engine has to do little: run a call in a number of allocations at the same time, report those that are lost, end them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from footplate.launch.cluster.agent import AgentCall

log = logging.getLogger(__name__)

# Time between two warnings that there is too little room.
WARN_AGAIN_S = 60.0


@dataclass(frozen=True)
class Lost:
    """A lost allocation, and how it was lost. The text is read after "rank 1 was lost with its node host-a: "."""

    index: int
    text: str


class CountedSlots:
    """The part of a `Placement` of an engine whose slots are alike, so that only their number counts.

    Attributes:
        min_workers: the fewest workers that are enough; None for all.
    """

    name: str
    min_workers: int | None = None
    _warn_at = 0.0

    def room(self) -> int:
        """The number of workers that could run now, with those that run."""
        raise NotImplementedError

    def present(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        """As many slots as there is room for. Without `min_workers`, all: the engine waits for room."""
        if self.min_workers is None:
            return slots
        room = self.room()
        if room >= self.min_workers:
            return slots[:room]
        if time.monotonic() > self._warn_at:
            self._warn_at = time.monotonic() + WARN_AGAIN_S
            log.warning(
                "%s has room for %d worker(s), and min_np=%d. Waiting for more", self.name, room, self.min_workers
            )
        return ()

    def leaving(self) -> bool:
        """False: no machine was asked to end."""
        return False


class Placement(Protocol):
    """Starts agents in a cluster, all of them or none.

    Attributes:
        name: of the engine, for messages.
        host: the address of this machine at which the agents can reach it; loopback if all of them are here.
        min_workers: the fewest workers for which the first `slots` are enough; None for all that are wanted.
    """

    name: str
    host: str
    min_workers: int | None

    def slots(self, wanted: int = 0) -> int:
        """The number of workers of this shape that the cluster can hold at once, now.

        Machines may register one by one. An engine that can't tell how many will come waits for `wanted` slots, as long as
        machines register.
        """
        ...

    def present(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        """See `WorkerGroup.present`."""
        ...

    def leaving(self) -> bool:
        """See `WorkerGroup.leaving`."""
        ...

    def start(self, slots: Sequence[int], call: AgentCall) -> None:
        """Run `call(index)` for each index of `slots`, each in an allocation, at the same time. Don't wait for them.

        It is called again, after `close`, when allocations were lost.

        Raises:
            LaunchError: the cluster can't hold all of them.
        """
        ...

    def lost(self) -> list[Lost]:
        """Allocations that were lost since `start`, each reported once; also those where `call` has raised.

        Raises:
            LaunchError: the agents can't be placed, and another try would not help.
        """
        ...

    def close(self) -> None:
        """End all that `start` has begun; nothing of it is left when this returns. May be called before `start`."""
        ...
