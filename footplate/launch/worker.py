"""What a function may ask and say while it runs in a worker process.

Outside a launch each of these is harmless, so code that uses them runs anywhere.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Protocol

LAUNCH = "FOOTPLATE_LAUNCH"  # the environment variable with the launch's name, which no other launch has


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


def kept() -> Path | None:
    """A directory of this machine which lasts from attempt to attempt of this launch; None outside a launch.

    It is this user's alone. At the launch's end it is removed, on all machines that have workers then; one that had some
    before keeps it until its temporary directory is cleared.
    """
    launch = os.environ.get(LAUNCH)
    if launch is None:
        return None
    directory = kept_of(launch)
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to somebody else.")
    return directory


def kept_of(launch: str) -> Path:
    """Where that directory is for a launch, whether it is there or not."""
    return Path(tempfile.gettempdir()) / f"footplate-launch-{launch}"


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
