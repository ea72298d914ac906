"""What the ends of its processes mean for an attempt: pure, and the same wherever the processes are.

    master, workers      the work; the attempt succeeds when the master does (exit code 0), the workers then have `GRACE_S`
    parameter servers    serve them: told to end as soon as the master is done
    evaluators           look on: they have `GRACE_S` after the master; that one fails is noted, and stops nobody

If a process of the work fails, or a parameter server, the attempt has failed: the others, which mostly fail of it at once,
have `PEERS_S`. Its cause is the first failure (`launch/failure.py`).

An exit code tells what kind of failure it is. 2 is a mistake that trying again won't correct, as argparse and Footplate
have it. 143, or SIGTERM, which nobody here has sent, is the machine's: it is going to stop. 1 is an exception. The cause
of a failure by 1 or 2 has the last line that the process wrote. A process without an exit code was lost with its machine.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from footplate.launch.failure import Failure, cause_of, of_exit

GRACE_S = 30.0
PEERS_S = 5.0
SAID = 300  # characters of what a process said last
_TOLD = (143, -signal.SIGTERM)


@dataclass(frozen=True)
class End:
    """A process has ended.

    Attributes:
        role: master, worker, parameter_server, evaluator.
        index: among those of its role.
        code: its exit code, or a signal's number made negative; None when it was lost with its machine.
        outcome: how it ended, in words.
        at: when, on the monotonic clock, in seconds.
    """

    role: str
    index: int
    code: int | None
    outcome: str
    at: float


@dataclass(frozen=True)
class Orders:
    """What is to be done with the processes that are left.

    Attributes:
        ask: the roles that are told to end, by SIGTERM.
        kill_within_s: after which all are killed.
    """

    ask: tuple[str, ...] = ()
    kill_within_s: float = float("inf")


class Verdict:
    """Hears how processes end, and knows what that means."""

    def __init__(self) -> None:
        self.succeeded = False
        self._failures: list[Failure] = []

    @property
    def failure(self) -> Failure | None:
        """What ended the attempt, unless it succeeded."""
        return cause_of(self._failures) if self._failures and not self.succeeded else None

    def ended(self, end: End) -> Orders:
        """A process has ended by itself: what follows for the others."""
        if self.succeeded:
            return Orders()
        if end.role == "master" and end.code == 0 and not self._failures:
            self.succeeded = True
            return Orders(("parameter_server",), GRACE_S)
        if end.code != 0 and end.role != "evaluator":
            self._failures.append(failure_of(end))
            return Orders(kill_within_s=0.0 if self._failures[-1].mistake else PEERS_S)
        return Orders(kill_within_s=PEERS_S) if end.role == "master" else Orders()


def outcome(code: int, said: str) -> str:
    """How a process ended, in words.

    Args:
        code: its exit code, or a signal's number made negative.
        said: the last line that it wrote.
    """
    if code == 0:
        return "ended with exit code 0"
    return of_exit(code)[1] + (f": {said[:SAID]}" if said and code in (1, 2) else "")


def failure_of(end: End) -> Failure:
    """What kind of failure an end is that is none of success."""
    text = f"{end.role.replace('_', ' ')} {end.index} {end.outcome}"
    if end.code is None:
        return Failure("host", text, end.at, lost=True)
    kind = "host" if end.code in _TOLD else "exception" if end.code == 1 else of_exit(end.code)[0]
    return Failure(kind, text, end.at, mistake=end.code == 2, code=128 - end.code if end.code < 0 else end.code)
