"""The contract of whatever starts the processes of a launch and carries messages to and from them.

The supervisor decides, a crew does: processes of this machine (`local.py`) today, a cluster's tomorrow.

    supervisor                          crew
    begin(attempt)        ───────►      starts one worker for each rank, with a rendezvous of its own
    wait(timeout_s)       ◄───────      what has happened since: signs of life, output, reports, ends
    send, kill, release   ───────►      a signal to a rank; the end of a rank; "all have reported, you may go"
    close()               ───────►      nothing is left when it returns

A crew says `Ended` exactly once of each rank that an attempt began, also of one that never came to life; an attempt is over
when all have ended, and only then the next one begins. What a worker wrote and reported comes before its `Ended`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True)
class Attempt:
    """One rendezvous.

    Attributes:
        number: 0, 1, …
        slots: of each rank, its place in the original world.
        terminals: which of rank 0's streams are to be a terminal.
    """

    number: int
    slots: tuple[int, ...]
    terminals: frozenset[Stream] = frozenset()


@dataclass(frozen=True)
class Report:
    """How a worker's function came to its end, told by the worker.

    Attributes:
        kind: `returned`; `left` (`SystemExit` with code 0); `stopped` (asked to end: code 143 or 130); `exit`
            (another code); `raised`.
        at: when, on the machine's monotonic clock, in seconds.
        code: the exit code.
        text: of an exception, to be read after "rank 1 ".
        traceback: of an exception, whole.
        mistake: whether the exception is a `FootplateError`.
        passing: whether it is about what may have changed the next time (`failure.may_pass`).
    """

    kind: Literal["returned", "left", "stopped", "exit", "raised"]
    at: float
    code: int = 0
    text: str = ""
    traceback: str = ""
    mistake: bool = False
    passing: bool = False


@dataclass(frozen=True)
class Alive:
    """A sign of life; `progressed` when the work has advanced since the last one."""

    rank: int
    progressed: bool = False


@dataclass(frozen=True)
class Wrote:
    """A piece of output; `raw` when the rank takes it for a terminal's, to be passed on as it is."""

    rank: int
    stream: Stream
    data: bytes
    raw: bool = False


@dataclass(frozen=True)
class Reported:
    """A worker's report. `load` gives what the function returned or raised, and may raise itself.

    `home` is the descriptor of the parcel that both are in; the crew closes it when the next attempt begins.
    """

    rank: int
    report: Report
    load: Callable[[], Any] = field(repr=False)
    home: int = -1


@dataclass(frozen=True)
class Ended:
    """A process is no more. `code` is its exit code, or a signal's number made negative.

    When the crew lost it rather than saw it end, `code` is None and `text` says what happened, to be read after "rank 1 ".
    If that befell all ranks together, `whole` is true and `text` a sentence by itself.
    """

    rank: int
    code: int | None
    at: float
    text: str = ""
    whole: bool = False


Event = Alive | Wrote | Reported | Ended


class Crew(Protocol):
    """See the module's docstring."""

    def begin(self, attempt: Attempt) -> None:
        """Start the workers of an attempt; doesn't wait for them."""
        ...

    def wait(self, timeout_s: float) -> list[Event]:
        """What has happened; returns when something has, at `wake`, or after `timeout_s`.

        Raises:
            LaunchError: no worker can ever be started here.
        """
        ...

    def wake(self) -> None:
        """Let `wait` return; may be called from a signal handler."""
        ...

    def send(self, rank: int, signum: int) -> None:
        """Send a signal to a rank's process, if it is there."""
        ...

    def kill(self, rank: int) -> None:
        """End a rank's process and what it has started, at once."""
        ...

    def release(self) -> None:
        """All ranks have reported: nobody needs the rendezvous any more."""
        ...

    def silence_s(self, rank: int) -> float:
        """For how long nothing has come from the machine of a rank; 0 if that is this one."""
        ...

    def close(self) -> None:
        """End and forget everything."""
        ...
