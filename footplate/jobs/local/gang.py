"""The processes of one attempt: started together, heard, and ended together.

    master, workers      the work; the attempt succeeds when the master does (exit code 0), the workers then have `GRACE_S`
    parameter servers    serve them: told to end as soon as the master is done
    evaluators           look on: they have `GRACE_S` after the master; that one fails is noted, and stops nobody

If a process of the work fails, or a parameter server, the attempt has failed: the others, which mostly fail of it at once,
have `PEERS_S`. Its cause is the first failure (`launch/failure.py`).

An exit code tells what kind of failure it is. 2 is a mistake that trying again won't mend, as argparse and Footplate
have it. 143, or SIGTERM, which nobody here has sent, is the machine's: it is going to stop. 1 is an exception, known
by the last line that the process wrote.

Each process leads a group of its own. It dies with this one, and what it has left of its group dies with it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from footplate.jobs.local.identity import Identity
from footplate.jobs.local.logfiles import Writer
from footplate.launch.failure import Failure, cause_of, of_exit
from footplate.launch.family import die_with

GRACE_S = 30.0
PEERS_S = 5.0
PIECE = 1 << 16  # bytes read at once
_LEFT = 1024  # pieces that are read of a process that has ended: what it has left running may write for ever
_TOLD = (143, -signal.SIGTERM)


@dataclass(frozen=True)
class Member:
    """A process that is to be.

    Attributes:
        role: master, worker, parameter_server, evaluator.
        index: among those of its role.
        command: the program and its arguments.
        environment: all of its variables.
        directory: its current one.
        log: where its output is kept.
    """

    role: str
    index: int
    command: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    log: Path

    @property
    def name(self) -> str:
        """What it is called."""
        return f"{self.role.replace('_', ' ')} {self.index}"


@dataclass
class Replica:
    """A process that runs, or ran.

    Attributes:
        mark: when it began, as `Identity.began` has it.
        code: its exit code, or a signal's number made negative; None while it runs.
        outcome: how it ended, in words.
    """

    member: Member
    process: subprocess.Popen[bytes]
    writer: Writer
    began: float
    mark: float
    code: int | None = None
    ended: float | None = None
    outcome: str = ""


class Gang:
    """The processes of an attempt. Call `wait` until it is `over`.

    Args:
        members: who they are.

    Raises:
        OSError: one of them can't be started; none is left.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.replicas: list[Replica] = []
        self.succeeded = False
        self._failures: list[Failure] = []
        self._stopping = False
        self._kill_at = float("inf")
        self._selector = selectors.DefaultSelector()
        try:
            for member in members:
                self._start(member)
        except BaseException:
            self.kill()
            self.close()
            raise

    @property
    def over(self) -> bool:
        """Whether all of them have ended."""
        return all(one.code is not None for one in self.replicas)

    @property
    def failure(self) -> Failure | None:
        """What ended the attempt, unless it succeeded or was stopped."""
        return cause_of(self._failures) if self._failures and not self.succeeded else None

    def wait(self, timeout_s: float) -> list[Replica]:
        """Hear them for so long, or until one has ended; returns those that have."""
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Replica):
                self._read(key.data)
        ended = [one for one in self.replicas if one.code is None and one.process.poll() is not None]
        for one in ended:
            self._end(one)
        if time.monotonic() >= self._kill_at:
            self.kill()
        return ended

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Ask all to end, by SIGTERM, and kill what is left after so many seconds."""
        if not self._stopping:
            self._stopping = True
            self._ask(self.replicas)
        self._kill_within(grace_s)

    def kill(self) -> None:
        """Kill what is left, with its groups."""
        for one in self.replicas:
            if one.code is None:
                _kill_group(one.process.pid)

    def close(self) -> None:
        """End the files; waits for those that were killed."""
        for one in self.replicas:
            if one.code is None:
                one.process.wait()
                self._end(one)
            one.writer.close()
        self._selector.close()

    def _start(self, member: Member) -> None:
        writer = Writer(member.log)
        ours, theirs = os.pipe()
        supervisor = os.getpid()
        try:
            process = subprocess.Popen(
                member.command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=dict(member.environment),
                cwd=member.directory, start_new_session=True, preexec_fn=lambda: die_with(supervisor),
            )  # fmt: skip
        except BaseException:
            os.close(ours)
            writer.close()
            raise
        finally:
            os.close(theirs)
        os.set_blocking(ours, False)
        identity = Identity.of(process.pid)
        replica = Replica(member, process, writer, time.time(), identity.began if identity else 0.0)
        self.replicas.append(replica)
        self._selector.register(ours, selectors.EVENT_READ, replica)
        if hasattr(os, "pidfd_open"):  # its end wakes us; elsewhere it is seen when the pipe closes, or a little later
            self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, process.pid)

    def _read(self, replica: Replica) -> bool:
        """Keep one piece of output; whether there was one."""
        fd = self._descriptor(replica)
        if fd is None:
            return False
        try:
            data = os.read(fd, PIECE)
        except BlockingIOError:
            return False
        if not data:
            self._forget(fd)
            return False
        replica.writer.write(data)
        return True

    def _end(self, replica: Replica) -> None:
        """A process has ended: take what it has left behind, and see what that means for the others."""
        _kill_group(replica.process.pid)
        for _ in range(_LEFT):
            if not self._read(replica):
                break
        for key in [one for one in self._selector.get_map().values() if one.data in (replica, replica.process.pid)]:
            self._forget(key.fd)
        replica.code, replica.ended = replica.process.returncode, time.time()
        replica.outcome = _outcome(replica)
        if not self._stopping and not self.succeeded:
            self._judge(replica)

    def _judge(self, replica: Replica) -> None:
        role = replica.member.role
        if role == "master" and replica.code == 0 and not self._failures:
            self.succeeded = True
            self._ask([one for one in self.replicas if one.member.role == "parameter_server"])
            self._kill_within(GRACE_S)
        elif replica.code != 0 and role != "evaluator":
            self._failures.append(_failure(replica))
            self._kill_within(0.0 if self._failures[-1].mistake else PEERS_S)
        elif role == "master":
            self._kill_within(PEERS_S)

    def _ask(self, replicas: Sequence[Replica]) -> None:
        for one in replicas:
            if one.code is None:
                one.process.terminate()

    def _kill_within(self, seconds: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _descriptor(self, replica: Replica) -> int | None:
        return next((key.fd for key in self._selector.get_map().values() if key.data is replica), None)

    def _forget(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)


def _outcome(replica: Replica) -> str:
    if replica.code == 0:
        return "ended with exit code 0"
    assert replica.code is not None
    said = replica.writer.last_line()[:300]
    return of_exit(replica.code)[1] + (f": {said}" if said and replica.code == 1 else "")


def _failure(replica: Replica) -> Failure:
    code = replica.code
    assert code
    kind = "host" if code in _TOLD else "exception" if code == 1 else of_exit(code)[0]
    text = f"{replica.member.name} {replica.outcome}"
    return Failure(kind, text, time.monotonic(), mistake=code == 2, code=128 - code if code < 0 else code)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
