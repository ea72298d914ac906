"""What went wrong in an attempt, and which of several failures was the cause.

When one rank dies, its peers die of it: their connections break, and they raise. So an attempt has many failures and one
cause. The cause is the earliest, with one correction: an exception is timed by the process that raises it, a death by
whoever notices it, which is a little later. So a death counts as `NOTICED_AFTER_S` older than it was noticed, and what was
lost with its machine as `LOST_AFTER_S` older: a cluster finds a machine dead by the heartbeats that it misses, when the
ranks on the others have long raised.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

NOTICED_AFTER_S = 0.2
LOST_AFTER_S = 60.0
HEAD = 500  # characters of an exception's text that a line of the log shows

LASTING = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)

Kind = Literal["exception", "exit", "signal", "frozen", "host"]


@dataclass(frozen=True)
class Failure:
    """How one rank, or what carries them all, failed.

    Attributes:
        kind: `exception` (raised by the function), `exit` (the process ended by itself without a result), `signal`
            (killed by one), `frozen` (no sign of life), `host` (the machine or the launcher lost it).
        text: what happened, to be read after "rank 1 ".
        at: when, on the monotonic clock of this machine, in seconds.
        rank: which; None when it was no single one.
        slot: its place in the original world; None when it was no single one.
        traceback: the worker's, whole; empty when there is none.
        mistake: whether the exception is a `FootplateError`, which trying again doesn't mend.
        passing: whether the exception is about what may have changed by itself the next time; see `may_pass`.
        code: the exit code of a program that ends like this: 1 unless the rank had one; a signal's number + 128.
        lost: whether it went with its machine.
    """

    kind: Kind
    text: str
    at: float
    rank: int | None = None
    slot: int | None = None
    traceback: str = ""
    mistake: bool = False
    passing: bool = False
    code: int = 1
    lost: bool = False

    def __str__(self) -> str:
        return self.text if self.rank is None else f"rank {self.rank} {self.text}"

    @property
    def since(self) -> float:
        """When it may have happened, at the earliest; `at` is when it was noticed."""
        if self.lost:
            return self.at - LOST_AFTER_S
        return self.at if self.kind == "exception" else self.at - NOTICED_AFTER_S


def cause_of(failures: Iterable[Failure]) -> Failure:
    """The failure of which the others are consequences; a user's mistake, if there is one, before all else.

    >>> broken = Failure("exception", "raised RuntimeError: Connection closed by peer", at=10.05, rank=0)
    >>> cause_of([broken, Failure("signal", "was killed by SIGKILL", at=10.1, rank=1)]).rank
    1
    """
    return min(failures, key=lambda one: (not one.mistake, one.since))


def of_exit(code: int) -> tuple[Kind, str]:
    """Kind and text of an end by itself: an exit code, or a signal's number made negative.

    >>> of_exit(-9)
    ('signal', 'was killed by SIGKILL')
    >>> of_exit(3)
    ('exit', 'ended with exit code 3')
    """
    if code >= 0:
        early = " before its function had returned" if code == 0 else ""
        return "exit", f"ended with exit code {code}{early}"
    try:
        return "signal", f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return "signal", f"was killed by signal {-code}"


def of_exception(error: BaseException) -> str:
    """`raised ValueError: too large`, in one line.

    >>> of_exception(ValueError("a\\nb"))
    'raised ValueError: a b'
    """
    words = " ".join(str(error).split())
    shown = words if len(words) <= HEAD else words[:HEAD] + " …"
    return f"raised {type(error).__name__}: {shown}" if shown else f"raised {type(error).__name__}"


def may_pass(error: BaseException) -> bool:
    """Whether an exception is about what is outside of the program, such as a connection, a disk or the other ranks.

    A file that isn't there isn't: that is mostly a wrong name.

    >>> may_pass(ConnectionRefusedError()), may_pass(FileNotFoundError()), may_pass(TypeError())
    (True, False, False)
    """
    between_ranks = getattr(sys.modules.get("torch.distributed"), "DistError", OSError)
    return isinstance(error, (OSError, between_ranks)) and not isinstance(error, LASTING)
