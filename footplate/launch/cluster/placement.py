"""The contract of whatever puts agents on the machines of a cluster: Ray (`ray.py`), Spark (`spark.py`).

What an engine must do is little: run a call in so many places at the same time, tell of those that are lost, end them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from footplate.launch.cluster.agent import AgentCall


@dataclass(frozen=True)
class Lost:
    """A place that has gone, and how; the text is read after "rank 1 was lost with its node host-a: "."""

    index: int
    text: str


class Placement(Protocol):
    """Starts agents in a cluster, gang or nothing.

    Attributes:
        name: of the engine, for messages.
        host: the address of this machine by which the places can reach it; loopback if they are all here.
    """

    name: str
    host: str

    def slots(self) -> int:
        """How many workers of this shape the cluster can hold at once, now."""
        ...

    def start(self, count: int, call: AgentCall) -> None:
        """Run `call(index)` for index 0 … count-1 in so many places at the same time; doesn't wait for them.

        It is called again, after `close`, when places were lost.

        Raises:
            LaunchError: the cluster can't hold so many.
        """
        ...

    def lost(self) -> list[Lost]:
        """Places that have gone since `start`, each told once; also those where `call` has raised.

        Raises:
            LaunchError: the gang can't be placed, and trying again is of no use.
        """
        ...

    def close(self) -> None:
        """End all that `start` has begun; nothing of it is left when it returns. Harmless when nothing was."""
        ...
