"""What a function may ask and say while it runs in a worker process.

Outside a launch each of these is harmless, so code that uses them runs anywhere.
"""

from __future__ import annotations

import os
from typing import Protocol


class Line(Protocol):
    """The worker's way of talking to its supervisor."""

    def progressed(self) -> None:
        """Pass it on."""
        ...


TOLD = "\x1e"  # ASCII's "record separator": begins a line that is meant for the driver, whatever else is shown there

_line: Line | None = None


def connect(line: Line) -> None:
    """Called once, by the worker's bootstrap."""
    global _line
    _line = line


def inside() -> bool:
    """Whether this process is a worker of a launch, or was forked from one."""
    return _line is not None


def attempt() -> int:
    """How often this work was started before: 0 in the first attempt, and outside a launch."""
    return int(os.environ.get("FOOTPLATE_ATTEMPT", 0))


def slot() -> int:
    """The worker's place on its machine as it was launched, which chooses its device.

    It is the local rank until a rank is given up; from then on ranks are renumbered, and slots are not.
    """
    return int(os.environ.get("FOOTPLATE_SLOT") or os.environ.get("LOCAL_RANK") or 0)


def progressed() -> None:
    """Tell the supervisor that the work advances. Costs next to nothing: call it after every step.

    A failure after this is followed by a restart at once; failures without it, by ever longer pauses.
    """
    if _line is not None:
        _line.progressed()


def log_to_driver(message: str) -> None:
    """Print a message where the launch was made, also where the output of workers isn't shown."""
    mark = TOLD if inside() else ""
    print("\n".join(mark + line for line in str(message).splitlines()), flush=True)
