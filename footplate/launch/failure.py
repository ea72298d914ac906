"""Failures of an attempt, and which of several failures caused the other ones.

When one rank dies, the other ranks fail because of it: their connections break, and they raise. So an attempt has many
failures and one cause. The cause is the earliest failure, with one correction. The process that raises an exception takes
its time at once. The time of a death is when another process notices it, which is a little later. So a death counts as
`NOTICED_AFTER_S` older than it was noticed. A loss of a machine counts as `LOST_AFTER_S` older: a cluster misses several
heartbeats before it considers a machine dead, and by then the ranks on the other machines have raised.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from footplate.core.errors import PeerLostError

NOTICED_AFTER_S = 0.2
LOST_AFTER_S = 60.0
CONNECTION_S = 1.0
# Length limit of an exception's text in a log line.
MAX_CHARACTERS = 500

LASTING = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)

Kind = Literal["exception", "exit", "signal", "frozen", "host"]


@dataclass(frozen=True)
class Failure:
    """The failure of one rank, or of the process or machine that runs several.

    Attributes:
        kind: `exception` (raised by the function), `exit` (the process ended itself without a result), `signal`
            (killed by one), `frozen` (no sign of life), `host` (the machine or the launcher lost it).
        text: what happened, to be read after "rank 1 ".
        at: when, on the monotonic clock of this machine, in seconds.
        rank: its rank; None if several ranks failed together.
        slot: its rank in the original world; None if several ranks failed together.
        traceback: the worker's, whole; empty if there is none.
        mistake: whether the exception is a `FootplateError`, which another attempt would raise again.
        passing: whether the exception's cause may have gone the next time; see `may_pass`.
        code: the exit code of a program that ends like this: 1 unless the rank had one; a signal's number + 128.
        lost: whether it was lost with its machine.
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
        """The earliest time at which it may have happened; `at` is when it was noticed."""
        if self.lost:
            return self.at - LOST_AFTER_S
        if self.kind != "exception":
            return self.at - NOTICED_AFTER_S
        # A lost connection is mostly the work of another rank, whose end a busy machine may notice later.
        return self.at + CONNECTION_S if self.passing else self.at


def cause_of(failures: Iterable[Failure]) -> Failure:
    """Find the failure that caused the other ones. A user's mistake, if there is one, comes first.

    >>> broken = Failure("exception", "raised RuntimeError: Connection closed by peer", at=10.05, rank=0)
    >>> cause_of([broken, Failure("signal", "was killed by SIGKILL", at=10.1, rank=1)]).rank
    1
    >>> refused = Failure("exception", "raised ConnectionError: rank 1 did not answer", at=10.05, rank=0, passing=True)
    >>> cause_of([refused, Failure("signal", "was killed by SIGKILL", at=11.0, rank=1)]).rank
    1
    """
    return min(failures, key=lambda failure: (not failure.mistake, failure.since))


def of_exit(code: int) -> tuple[Kind, str]:
    """Kind and text of a process's end, given its exit code, or a signal's number made negative.

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
    """The text of an exception in one line: `raised ValueError: too large`.

    >>> of_exception(ValueError("a\\nb"))
    'raised ValueError: a b'
    """
    text = " ".join(str(error).split())
    shown = text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " …"
    return f"raised {type(error).__name__}: {shown}" if shown else f"raised {type(error).__name__}"


def may_pass(error: BaseException) -> bool:
    """Return True if an exception is about something outside of the program: a connection, a disk, the other ranks.

    A missing file doesn't count: mostly its name is wrong.

    >>> may_pass(ConnectionRefusedError()), may_pass(FileNotFoundError()), may_pass(TypeError())
    (True, False, False)
    >>> may_pass(RuntimeError("[/build/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [192.0.2.2]:694."))
    True
    """
    return between_ranks(error) or (isinstance(error, OSError) and not isinstance(error, LASTING))


def between_ranks(error: BaseException) -> bool:
    """Return True if an exception is about the connections between ranks, as when another rank has died.

    Gloo raises its errors as plain RuntimeErrors, whose text begins with the file in its source.

    >>> between_ranks(RuntimeError("[/build/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:694."))
    True
    >>> between_ranks(ConnectionResetError()), between_ranks(RuntimeError("Connection closed by peer"))
    (False, False)
    """
    if isinstance(error, RuntimeError) and re.match(r"\[\S*/gloo/\S+:\d+\]", str(error)):
        return True
    return isinstance(error, (PeerLostError, getattr(sys.modules.get("torch.distributed"), "DistError", PeerLostError)))
