"""Judge an attempt by the ends of its processes. The rules are pure, and the same on every backend.

    master, workers      do the work. The attempt succeeds when the master exits with 0; the workers then have `GRACE_S`
    parameter servers    serve them. They receive SIGTERM as soon as the master is done
    evaluators           have `GRACE_S` after the master. A failing evaluator is recorded, and stops nothing

If a master, a worker or a parameter server fails, the attempt has failed. The other processes usually fail soon after, and
have `PEERS_S` to do so. The attempt's cause is the first failure (`launch/failure.py`).

The exit code gives the kind of failure. 2 is a mistake that a retry won't correct, as with argparse and Footplate. 143, or
a SIGTERM that the supervisor didn't send, comes from a machine that is shutting down. 1 is an exception. The cause of a
failure with 1 or 2 includes the last line of output. A process without an exit code was lost with its machine.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from footplate.launch.failure import Failure, cause_of, of_exit

GRACE_S = 30.0
PEERS_S = 5.0
# Characters of the last line of output that are kept.
SAID = 300
_SIGTERM = (143, -signal.SIGTERM)


@dataclass(frozen=True)
class End:
    """The end of a process.

    Attributes:
        role: master, worker, parameter_server, evaluator.
        index: its number within its role.
        code: its exit code, or a signal's number made negative; None if it was lost with its machine.
        outcome: how it ended, in words.
        at: when it ended, in seconds on the monotonic clock.
    """

    role: str
    index: int
    code: int | None
    outcome: str
    at: float


@dataclass(frozen=True)
class Orders:
    """Instructions for the remaining processes.

    Attributes:
        ask: the roles to end, by SIGTERM.
        kill_within_s: kill all after this time.
    """

    ask: tuple[str, ...] = ()
    kill_within_s: float = float("inf")


class Verdict:
    """Collects the ends of processes, and judges the attempt."""

    def __init__(self) -> None:
        self.succeeded = False
        self._failures: list[Failure] = []

    @property
    def failure(self) -> Failure | None:
        """The failure that ended the attempt, unless it succeeded."""
        return cause_of(self._failures) if self._failures and not self.succeeded else None

    def ended(self, end: End) -> Orders:
        """Take the end of a process that nobody stopped. Returns what to do with the other processes."""
        if self.succeeded:
            return Orders()
        if end.role == "master" and end.code == 0 and not self._failures:
            self.succeeded = True
            return Orders(("parameter_server",), GRACE_S)
        if end.code != 0 and end.role != "evaluator":
            self._failures.append(failure_of(end))
            return Orders(kill_within_s=0.0 if self._failures[-1].mistake else PEERS_S)
        return Orders(kill_within_s=PEERS_S) if end.role == "master" else Orders()


def outcome(code: int, last_output: str) -> str:
    """Describe the end of a process.

    Args:
        code: its exit code, or a signal's number made negative.
        last_output: the last line of its output.
    """
    if code == 0:
        return "ended with exit code 0"
    return of_exit(code)[1] + (f": {last_output[:SAID]}" if last_output and code in (1, 2) else "")


def failure_of(end: End) -> Failure:
    """The failure of a process that didn't succeed."""
    text = f"{end.role.replace('_', ' ')} {end.index} {end.outcome}"
    if end.code is None:
        return Failure("host", text, end.at, lost=True)
    kind = "host" if end.code in _SIGTERM else "exception" if end.code == 1 else of_exit(end.code)[0]
    return Failure(kind, text, end.at, mistake=end.code == 2, code=128 - end.code if end.code < 0 else end.code)
