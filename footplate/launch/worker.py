"""Functions for code that runs in a worker process: the attempt, the slot, a kept directory, progress, reuse, messages.

Outside a launch each of these is harmless, so code that uses them runs anywhere.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from footplate.core.stacks import answering

# The environment variable with the launch's unique id.
LAUNCH = "FOOTPLATE_LAUNCH"
# ASCII's "record separator" begins a line for the driver, which always shows it.
FOR_DRIVER = "\x1e"


class Link(Protocol):
    """The worker's connection to its supervisor."""

    def progressed(self) -> None:
        """Tell the supervisor that the work has advanced."""
        ...

    def saved(self) -> None:
        """Tell the supervisor that the work is saved."""
        ...

    def reusable(self, clean_up: Callable[[], str]) -> None:
        """Note that the function may be called again in this process."""
        ...


_link: Link | None = None
# When this process was called again; None before that.
_called_again_at: float | None = None


def connect(link: Link) -> None:
    """Set the connection. The worker's bootstrap calls this once."""
    global _link
    _link = link


def called_again() -> None:
    """Note that another attempt begins in this process. The worker's bootstrap calls this."""
    global _called_again_at
    _called_again_at = time.monotonic()


def kept_s() -> float | None:
    """Seconds since this process was given to the present attempt; None if it was started for it."""
    return None if _called_again_at is None else time.monotonic() - _called_again_at


def inside() -> bool:
    """Return True if this process is a worker of a launch, or was forked from one.

    Examples:
        >>> from footplate.launch import worker
        >>> worker.inside()
        False
    """
    return _link is not None


def attempt() -> int:
    """The number of earlier attempts: 0 in the first attempt, and outside a launch.

    Examples:
        >>> from footplate.launch import worker
        >>> worker.attempt()
        0
    """
    return int(os.environ.get("FOOTPLATE_ATTEMPT", 0))


def slot() -> int:
    """The worker's local slot, which chooses its device.

    It is the local rank until a rank is given up. From then on ranks are renumbered, and slots are not.

    Examples:
        >>> from footplate.launch import worker
        >>> device = torch.device("cuda", worker.slot())
        >>> device.index
        0
    """
    return int(os.environ.get("FOOTPLATE_SLOT") or os.environ.get("LOCAL_RANK") or 0)


def kept() -> Path | None:
    """A directory of this machine that lasts for all attempts of this launch; None outside a launch.

    Only this user can read it. At the launch's end, all machines that have workers then remove it. A machine that had
    workers only before keeps it until its temporary directory is cleared.

    Examples:
        >>> from footplate.launch import worker
        >>> directory = worker.kept()
        >>> directory is None  # this process is no worker
        True
    """
    launch = os.environ.get(LAUNCH)
    if launch is None:
        return None
    directory = kept_of(launch)
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user.")
    return directory


def kept_of(launch: str) -> Path:
    """The path of a launch's directory, whether it exists or not."""
    return Path(tempfile.gettempdir()) / f"footplate-launch-{launch}"


def progressed() -> None:
    """Tell the supervisor that the work advances. This is cheap: call it after every step.

    After progress, a failure is followed by a restart at once. Without progress, each restart waits longer than the last.

    Examples:
        >>> from footplate.launch import worker
        >>> for step in range(3):
        ...     worker.progressed()
    """
    answering.progressed()
    if _link is not None:
        _link.progressed()


def saved() -> None:
    """Tell the supervisor that a checkpoint is complete, so that another attempt would continue from it.

    If a machine waits to take part (`footplate run --nnodes 2:4`), all ranks now get SIGTERM, and the next attempt has the
    ranks of that machine, too. The trainer calls this by itself.

    Examples:
        >>> from footplate.launch import worker
        >>> torch.save(model.state_dict(), "model.pt")
        >>> worker.saved()
    """
    if _link is not None:
        _link.saved()


def reusable(clean_up: Callable[[], str]) -> None:
    """Declare that the function may be called again in this process, after the loss of another rank (`process_reuse.py`).

    Without this call, every attempt has new processes. `Trainer(devices=N)` calls it by itself.

    Args:
        clean_up: brings what the function has used, such as process groups, to the state before the call. It returns ""
            if it could, or else why the process must end.
    """
    if _link is not None:
        _link.reusable(clean_up)


def log_to_driver(message: str) -> None:
    """Print a message in the process that has launched this one, even if it doesn't show the output of workers.

    Examples:
        >>> from footplate.launch import worker
        >>> worker.log_to_driver("epoch 3: loss 0.2")
        epoch 3: loss 0.2
    """
    mark = FOR_DRIVER if inside() else ""
    print("\n".join(mark + line for line in str(message).splitlines()), flush=True)
