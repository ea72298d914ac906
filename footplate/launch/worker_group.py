"""The contract of a worker group, which starts the processes of a launch and carries messages to and from them.

The supervisor decides, a worker group acts: on processes of this machine (`local.py`), or of a cluster
(`cluster/agent_group.py`).

    supervisor                          worker group
    present(slots)        ───────►      the slots whose machines are there
    begin(attempt)        ───────►      starts one worker for each rank, with a new rendezvous
    wait(timeout_s)       ◄───────      the events since then: signs of life, output, reports, ends
    ask_stacks            ───────►      `Stacks` of all ranks follow as events
    send, kill, release   ───────►      a signal to a rank; the end of a rank; "all have reported, you may end"
    close()               ───────►      nothing is left when it returns

A worker group reports `Ended` exactly once for each rank that an attempt began, also for a rank that was never started. An
attempt is over when all ranks have ended, and only then the next one begins. A worker's output and report come before its
`Ended`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from footplate.core.stacks.snapshot import Process

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True)
class Attempt:
    """One attempt of a launch. All its ranks meet in one rendezvous.

    Attributes:
        number: 0, 1, …
        slots: for each rank, the rank that it had in the original world.
        terminals: which of rank 0's streams are to be a terminal.
    """

    number: int
    slots: tuple[int, ...]
    terminals: frozenset[Stream] = frozenset()


@dataclass(frozen=True)
class Report:
    """A worker's report of how its function ended.

    Attributes:
        kind: `returned`; `left` (`SystemExit` with code 0); `stopped` (asked to end: code 143 or 130); `exit`
            (another code); `raised`.
        at: when, on the machine's monotonic clock, in seconds.
        code: the exit code.
        text: of an exception, to be read after "rank 1 ".
        traceback: of an exception, whole.
        mistake: whether the exception is a `FootplateError`.
        passing: whether its cause may have gone the next time (`failure.may_pass`).
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
    """A sign of life. Since the last one, has the work advanced (`progressed`), and was it saved (`saved`)?"""

    rank: int
    progressed: bool = False
    saved: bool = False


@dataclass(frozen=True)
class Wrote:
    """A piece of output. `raw`: the rank writes to a terminal, so the piece is passed on unchanged."""

    rank: int
    stream: Stream
    data: bytes
    raw: bool = False


@dataclass(frozen=True)
class Reported:
    """A worker's report. `load` gives what the function returned or raised, and may raise itself.

    Both are in the payload with the descriptor `payload_fd`. The worker group closes it when the next attempt begins.
    """

    rank: int
    report: Report
    load: Callable[[], Any] = field(repr=False)
    payload_fd: int = -1


@dataclass(frozen=True)
class Ended:
    """The end of a process. `code` is its exit code, or a signal's number made negative.

    If the worker group has lost the process instead of seeing its end, `code` is None. `text` then says what happened, to
    be read after "rank 1 ". If all ranks were lost together, `all_ranks` is true and `text` is a sentence of its own.
    `silent`: nothing had come from its machine for some seconds, so its connections to other ranks may still be open.
    """

    rank: int
    code: int | None
    at: float
    text: str = ""
    all_ranks: bool = False
    silent: bool = False


@dataclass(frozen=True)
class Stacks:
    """The stacks of a rank, after `ask_stacks`."""

    rank: int
    process: Process


Event = Alive | Wrote | Reported | Ended | Stacks


class WorkerGroup(Protocol):
    """The processes of a launch; see the module's docstring."""

    def present(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        """Those of a launch's slots whose machines are there. None while there are too few machines.

        Where machines don't come and go, that is all of them.
        """
        ...

    def leaving(self) -> bool:
        """Whether a machine that is still used was asked to end. `present` leaves it out."""
        ...

    def begin(self, attempt: Attempt) -> None:
        """Start the workers of an attempt. Doesn't wait for them."""
        ...

    def wait(self, timeout_s: float) -> list[Event]:
        """Return the new events: as soon as there are any, at `wake`, or after `timeout_s`.

        Raises:
            LaunchError: no worker can ever be started here.
        """
        ...

    def wake(self) -> None:
        """Let `wait` return. A signal handler may call this."""
        ...

    def send(self, rank: int, signum: int) -> None:
        """Send a signal to a rank's process, if there is one."""
        ...

    def kill(self, rank: int) -> None:
        """Kill a rank's process and what it has started, at once."""
        ...

    def ask_stacks(self, limit_s: float, native: bool) -> None:
        """Ask for the stacks of all ranks. Doesn't wait: `Stacks` arrive, of ranks that exist.

        Args:
            limit_s: the answers may take this time on a rank's machine.
            native: read native stacks, too, where py-spy is installed and allowed. It pauses the ranks for a moment.
        """
        ...

    def release(self) -> None:
        """Let workers end: all ranks have reported, and no rank needs the rendezvous any more."""
        ...

    def silence_s(self, rank: int) -> float:
        """Seconds since something arrived from the machine of a rank; 0 if that is this machine."""
        ...

    def close(self) -> None:
        """End all processes, and free everything."""
        ...
