"""The processes of an attempt on this machine: started, followed, judged (`supervision/exit_status.py`) and ended together.

Each process leads its own process group. It dies with the supervisor, and the rest of its group dies with it. A child that
has left the group, by setsid, dies when the attempt is over: `FOOTPLATE_JOB_ID` in its environment identifies it.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from footplate.jobs.backends.local.usage import Meter
from footplate.jobs.fork_server import programs
from footplate.jobs.fork_server.programs import ForkedProgram
from footplate.jobs.record import Process
from footplate.jobs.redaction import StreamMask, secrets
from footplate.jobs.supervision.exit_status import GRACE_S, End, Orders, Verdict, outcome
from footplate.jobs.supervision.identity import Identity
from footplate.jobs.supervision.logfiles import Writer
from footplate.launch.failure import Failure
from footplate.launch.process_lifetime import die_with, kill_group, kill_marked

# Number of bytes that are read at once.
PIECE = 1 << 16
JOB_ID = "FOOTPLATE_JOB_ID"
# Pieces of output to read after a process has ended. Its children may never stop writing.
_LEFT = 1024


@dataclass(frozen=True)
class Member:
    """A process to start.

    Attributes:
        role: master, worker, parameter_server, evaluator.
        index: its number within its role.
        command: the program and its arguments.
        environment: all of its variables.
        directory: its current directory.
        log: the file for its output.
        base: the part of the variables that all processes of its job have. A fork is made with these.
    """

    role: str
    index: int
    command: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    log: Path
    base: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Replica:
    """A process that was started.

    Attributes:
        mark: its start time, as `Identity.began`.
        code: its exit code, or a signal's number made negative; None while it runs.
        outcome: how it ended, in words.
    """

    member: Member
    process: subprocess.Popen[bytes] | ForkedProgram
    writer: Writer
    began: float
    mark: float
    code: int | None = None
    ended: float | None = None
    outcome: str = ""


class LocalAttempt:
    """The processes of an attempt. Implements `Attempt`. Call `wait` until it is `over`.

    Args:
        members: the processes to start.
        attempt: the attempt's number.
        meter: samples the use of the machine.

    Raises:
        OSError: a process can't be started. Then no process is left.
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
        """True: the processes have begun."""
        return True

    @property
    def waits_for(self) -> str:
        """Empty: nothing to wait for."""
        return ""

    @property
    def processes(self) -> list[Process]:
        """The processes."""
        return [self._process(replica) for replica in self.replicas]

    @property
    def over(self) -> bool:
        """True when all processes have ended."""
        return all(replica.code is not None for replica in self.replicas)

    @property
    def succeeded(self) -> bool:
        """True if the master has done its work."""
        return self._verdict.succeeded

    @property
    def failure(self) -> Failure | None:
        """The failure that ended the attempt, unless it succeeded or was stopped."""
        return self._verdict.failure

    def wait(self, timeout_s: float) -> list[Process]:
        """Read output until the time is over or a process has ended. Returns the processes that have ended."""
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Replica):
                self._read(key.data)
        ended = [replica for replica in self.replicas if replica.code is None and replica.process.poll() is not None]
        for replica in ended:
            self._end(replica)
        if time.monotonic() >= self._kill_at:
            self.kill()
        if self._meter is not None and not self.over:
            self._meter.sample([replica.process.pid for replica in self.replicas if replica.code is None])
        return [self._process(replica) for replica in ended]

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Send SIGTERM to all processes, and kill the remaining ones after `grace_s` seconds."""
        if not self._stopping:
            self._stopping = True
            self._ask(self.replicas)
        self._kill_within(grace_s)

    def kill(self) -> None:
        """Kill the remaining processes and their groups."""
        for replica in self.replicas:
            if replica.code is None:
                kill_group(replica.process.pid)

    def close(self) -> None:
        """Kill the remaining processes, collect their exit codes, and close the files."""
        self.kill()
        for replica in self.replicas:
            if replica.code is None:
                replica.process.wait()
                self._end(replica)
            replica.writer.close()
        for job in {replica.member.environment.get(JOB_ID, "") for replica in self.replicas} - {""}:
            kill_marked(JOB_ID, job)
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
        try:
            process = _start_program(member, theirs)
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
        # The end of the process wakes the selector. Without pidfd, the closing pipe or the next tick shows it.
        if hasattr(os, "pidfd_open"):
            self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, process.pid)

    def _read(self, replica: Replica) -> bool:
        """Keep a piece of output. Returns True if there was one."""
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
        """Handle the end of a process: read its remaining output, and act on the other processes."""
        kill_group(replica.process.pid)
        for _ in range(_LEFT):
            if not self._read(replica):
                break
        replica.writer.end()
        for key in [key for key in self._selector.get_map().values() if key.data in (replica, replica.process.pid)]:
            self._forget(key.fd)
        code = replica.code = replica.process.wait()
        replica.ended = time.time()
        replica.outcome = outcome(code, replica.writer.last_line())
        if not self._stopping:
            member = replica.member
            end = End(member.role, member.index, code, replica.outcome, time.monotonic())
            self._carry_out(self._verdict.ended(end))

    def _carry_out(self, orders: Orders) -> None:
        self._ask([replica for replica in self.replicas if replica.member.role in orders.ask])
        self._kill_within(orders.kill_within_s)

    def _ask(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            if replica.code is None:
                replica.process.terminate()

    def _kill_within(self, seconds: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _descriptor(self, replica: Replica) -> int | None:
        return next((key.fd for key in self._selector.get_map().values() if key.data is replica), None)

    def _forget(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)


def _start_program(member: Member, output: int) -> subprocess.Popen[bytes] | ForkedProgram:
    """Start a program, in a fork of a fork server's process if this supervisor has one."""
    forked = programs.start(member.command, member.base, member.environment, member.directory, output)
    if forked is not None:
        return forked
    supervisor = os.getpid()
    return subprocess.Popen(
        member.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(member.environment),
        cwd=member.directory, start_new_session=True, preexec_fn=lambda: die_with(supervisor),
    )  # fmt: skip
