"""The processes of one attempt on this machine: started, heard, judged (`supervision/exit_status.py`) and ended together.

Each process leads a group of its own. It dies with this one, and what it has left of its group dies with it. What has left
the group, by setsid, dies when the attempt is over: it is found by `FOOTPLATE_JOB_ID` among its variables.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from footplate.jobs.backends.local.usage import Meter
from footplate.jobs.record import Process
from footplate.jobs.redaction import StreamMask, secrets
from footplate.jobs.supervision.exit_status import GRACE_S, End, Orders, Verdict, outcome
from footplate.jobs.supervision.identity import Identity
from footplate.jobs.supervision.logfiles import Writer
from footplate.launch.failure import Failure
from footplate.launch.family import die_with, kill_group, kill_marked

PIECE = 1 << 16  # bytes read at once
JOB_ID = "FOOTPLATE_JOB_ID"
_LEFT = 1024  # pieces that are read of a process that has ended: what it has left running may write for ever


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
    """The processes of an attempt, which is under way with them: an `Attempt`. Call `wait` until it is `over`.

    Args:
        members: who they are.
        attempt: which attempt it is.
        meter: which looks now and then how busy they are.

    Raises:
        OSError: one of them can't be started; none is left.
    """

    def __init__(self, members: Sequence[Member], attempt: int = 1, meter: Meter | None = None) -> None:
        self._attempt = attempt
        self._meter = meter
        self.replicas: list[Replica] = []
        self._verdict = Verdict()
        self._stopping = False
        self._kill_at = float("inf")
        self._selector = selectors.DefaultSelector()
        try:
            for member in members:
                self._start(member)
        except BaseException:
            self.close()
            raise

    @property
    def running(self) -> bool:
        """They have begun."""
        return True

    @property
    def waits_for(self) -> str:
        """Nothing."""
        return ""

    @property
    def processes(self) -> list[Process]:
        """Who they are."""
        return [self._process(one) for one in self.replicas]

    @property
    def over(self) -> bool:
        """Whether all of them have ended."""
        return all(one.code is not None for one in self.replicas)

    @property
    def succeeded(self) -> bool:
        """Whether the master has done its work."""
        return self._verdict.succeeded

    @property
    def failure(self) -> Failure | None:
        """What ended the attempt, unless it succeeded or was stopped."""
        return self._verdict.failure

    def wait(self, timeout_s: float) -> list[Process]:
        """Hear them for so long, or until one has ended; returns those that have."""
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Replica):
                self._read(key.data)
        ended = [one for one in self.replicas if one.code is None and one.process.poll() is not None]
        for one in ended:
            self._end(one)
        if time.monotonic() >= self._kill_at:
            self.kill()
        if self._meter is not None and not self.over:
            self._meter.look([one.process.pid for one in self.replicas if one.code is None])
        return [self._process(one) for one in ended]

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
                kill_group(one.process.pid)

    def close(self) -> None:
        """Kill what is left, wait for it, and end the files."""
        self.kill()
        for one in self.replicas:
            if one.code is None:
                one.process.wait()
                self._end(one)
            one.writer.close()
        for job in {one.member.environment.get(JOB_ID, "") for one in self.replicas} - {""}:
            kill_marked(JOB_ID, job)
        self._selector.close()

    def _process(self, replica: Replica) -> Process:
        member = replica.member
        return Process(
            self._attempt, member.role, member.index, replica.process.pid, replica.mark, replica.began, replica.ended,
            replica.outcome,
        )  # fmt: skip

    def _start(self, member: Member) -> None:
        writer = Writer(member.log, stream_mask=StreamMask(secrets(member.environment)))
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
        kill_group(replica.process.pid)
        for _ in range(_LEFT):
            if not self._read(replica):
                break
        replica.writer.end()
        for key in [one for one in self._selector.get_map().values() if one.data in (replica, replica.process.pid)]:
            self._forget(key.fd)
        code = replica.code = replica.process.returncode
        replica.ended = time.time()
        replica.outcome = outcome(code, replica.writer.last_line())
        if not self._stopping:
            member = replica.member
            end = End(member.role, member.index, code, replica.outcome, time.monotonic())
            self._obey(self._verdict.ended(end))

    def _obey(self, orders: Orders) -> None:
        self._ask([one for one in self.replicas if one.member.role in orders.ask])
        self._kill_within(orders.kill_within_s)

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
