"""The life of a worker process, from the fork to its end.

1. Output goes to the pipes that the supervisor reads; the environment gets `RANK` and the rest.
2. A thread starts to send a sign of life each second. If the supervisor is gone, it kills this process and its children.
   Another thread answers questions for the stacks of this process (`core/stacks/answering.py`).
3. Rank 0 hosts the store of this attempt's rendezvous, on a socket that listens already: no other process can take its
   port. It may wait for the first connection (`rendezvous.py`).
4. The function is unpickled and called.
5. A report, with the result or the exception, goes back in a payload. Rank 0 then waits until all ranks have reported:
   other ranks may still need its store.
6. Threads are joined and exit handlers run, as at the end of any Python program.

In the place of 6, a process may *rejoin*. If its function failed only because another rank was lost, and said before that
it may be called again (`worker.reusable`), the process cleans up after the function and offers itself. A process in which
anything is left of the call (`process_state.py`) doesn't: it ends. Nor does one that was given a second call and made no
progress in it. The supervisor gives the process a rank of the next
attempt, with new pipes for its output and its report, and it goes on with 3. So what it has imported stays.

On the control socket, a worker sends single bytes: `ALIVE`, `PROGRESSED`, `SAVED`, `REPORT`, `FREE`. The supervisor sends
messages (`wire.py`), and the end of the stream means that it is gone:

    release     all ranks have reported
    call        the next attempt's call, with its descriptors    (to a free process)
    end         end, as in 6                                     (to a free process)
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import random
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from footplate.core.errors import FootplateError, LaunchError
from footplate.core.stacks import answering
from footplate.hardware.machine import usable_cores
from footplate.launch import failure, payload, script, wire, worker
from footplate.launch.process_state import ProcessState
from footplate.launch.program_end import end_program, exit_code, flush_streams
from footplate.launch.rendezvous import host_store
from footplate.launch.worker_group import Report

HEARTBEAT_S = 1.0
ALIVE, PROGRESSED, SAVED, REPORT, FREE = b"a", b"p", b"s", b"r", b"f"
# Frames of these files are left out of tracebacks.
HIDDEN_FILES = {__file__, script.__file__, runpy.__file__, "<frozen runpy>"}
# Exit codes after SIGTERM and SIGINT.
STOPPED = {143, 130}


@dataclass(frozen=True)
class Call:
    """A call of the function, in one attempt.

    The descriptors that come with it: report, standard output, standard error, [store].

    Attributes:
        rank: the rank.
        variables: variables with its ranks and its rendezvous, over the launch's.
    """

    rank: int
    variables: dict[str, str]


@dataclass(frozen=True)
class WorkerSpec:
    """The description of a worker.

    The descriptors that come with it: control, payload, and those of its first call.

    Attributes:
        environment: variables of the launch.
        argv: the arguments of the script.
        directory: the current directory.
        call: the first call, as a dict.
    """

    environment: dict[str, str]
    argv: list[str]
    directory: str
    call: dict[str, Any]


def main(spec: WorkerSpec, fds: list[int]) -> NoReturn:
    """Run the worker. Never returns."""
    control, payload_fd, *fds = fds
    call: Call | None = Call(**spec.call)
    os.environ.update(spec.environment)
    _redirect(*fds[1:3])
    _open_streams()
    link = SupervisorLink(socket.socket(fileno=control))
    worker.connect(link)

    state, code = ProcessState(), 0
    # Objects that must outlive the call: the store.
    kept_alive: list[Any] = []
    while call is not None:
        report_fd, _, _, *store = fds
        _prepare(call, spec)
        code = _serve(call, payload_fd, report_fd, store, kept_alive, link)
        call, fds = link.next_call() if _is_clean(state, kept_alive, link) else (None, [])
        if call is not None:
            _redirect(*fds[1:3])
            worker.called_again()
    end_program(code)


def _prepare(call: Call, spec: WorkerSpec) -> None:
    """Set up the process for a call."""
    os.environ.update(call.variables)
    # This machine doesn't have the directory.
    with contextlib.suppress(OSError):
        os.chdir(spec.directory)
    sys.argv = list(spec.argv)
    _reseed()
    _share_cores()
    answering.begin_again()


def _serve(
    call: Call, payload_fd: int, report_fd: int, store: list[int], kept_alive: list[Any], link: SupervisorLink
) -> int:
    """Call the function in an attempt, and report; return the exit code."""
    report = _run(payload_fd, report_fd, store, call.rank, kept_alive, link)
    os.close(report_fd)
    flush_streams()
    link.report()
    # Other ranks may still need the store that this process hosts.
    if store and report.kind not in ("raised", "exit"):
        link.released.wait()
    return report.code


def _is_clean(state: ProcessState, kept_alive: list[Any], link: SupervisorLink) -> bool:
    """Clean up after a call that may be followed by another one. Return True if nothing is left of it."""
    clean_up = link.clean_up if link.lost_peer else None
    # Whatever keeps the ranks from going on, it isn't the state of a process more than once.
    if clean_up is None or (link.kept and not link.has_progressed):
        return False
    kept_alive.clear()
    try:
        remains = clean_up()
        del clean_up
        link.clean_up = None
        state.restore()
        state.forget_modules()
        remains = remains or state.remains()
    except Exception as error:
        remains = f"its state can't be brought back: {type(error).__name__}: {error}"
    if remains:
        print(f"A new process takes the place of this one: {remains}.", file=sys.stderr)
    flush_streams()
    return not remains


class SupervisorLink:
    """The worker's end of the control socket, served by a thread.

    Attributes:
        released: set when all ranks have reported.
        clean_up: cleans up after the function, if it may be called again.
        lost_peer: whether the function has failed only because another rank was lost.
        has_progressed: whether the work has advanced in this call.
        kept: whether this is not the first call.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._advanced = False
        self.has_progressed = False
        self._next: queue.SimpleQueue[tuple[Call | None, list[int]]] = queue.SimpleQueue()
        self.released = threading.Event()
        self.clean_up: Callable[[], str] | None = None
        self.lost_peer = self.kept = False
        threading.Thread(target=self._serve, name="footplate-heartbeat", daemon=True).start()

    def next_call(self) -> tuple[Call | None, list[int]]:
        """Tell the supervisor that this process is free. Wait for its next call; return None if it shall end."""
        self.lost_peer = self._advanced = self.has_progressed = False
        self.kept = True
        self._send_surely(FREE)
        return self._next.get()

    def reusable(self, clean_up: Callable[[], str]) -> None:
        """Note that the function may be called again."""
        self.clean_up = clean_up

    def progressed(self) -> None:
        """Tell the supervisor at once the first time, and later with the next sign of life."""
        self._advanced = True
        if not self.has_progressed:
            self.has_progressed = True
            self._send(PROGRESSED)

    def saved(self) -> None:
        """Tell the supervisor at once."""
        self._send(SAVED)

    def report(self) -> None:
        """Tell the supervisor that the report is in its payload."""
        self._send_surely(REPORT)

    def _send_surely(self, byte: bytes) -> None:
        """Send a byte. Waits for a supervisor that is suspended."""
        while not self._send(byte):
            select.select([], [self._control], [], HEARTBEAT_S)

    def _send(self, byte: bytes) -> bool:
        """Send a byte; return False if the socket is full."""
        try:
            return self._control.send(byte, socket.MSG_DONTWAIT) == 1
        except BlockingIOError:
            return False
        except OSError:
            # The supervisor is gone. The thread notices that.
            return True

    def _serve(self) -> None:
        while True:
            advanced, self._advanced = self._advanced, False
            self._send(PROGRESSED if advanced else ALIVE)
            if select.select([self._control], [], [], HEARTBEAT_S)[0]:
                received = self._receive()
                if received is None:
                    os.killpg(os.getpgrp(), signal.SIGKILL)
                else:
                    self._handle(*received)

    def _receive(self) -> tuple[dict[str, Any], list[int]] | None:
        try:
            return wire.receive(self._control)
        except OSError:
            return None

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        if message["do"] == "release":
            self.released.set()
        elif message["do"] == "call":
            self.released.clear()
            self._next.put((Call(**message["call"]), fds))
        else:
            self._next.put((None, []))


def _run(
    payload_fd: int, report_fd: int, store: list[int], rank: int, kept_alive: list[Any], link: SupervisorLink
) -> Report:
    """Call the function, and write a report of how it ended; return the report.

    `kept_alive` gets the objects that must outlive the call: the store.
    """
    try:
        kept_alive.extend(host_store(fd) for fd in store)
        value = _unpack(payload_fd)()
    except SystemExit as end:
        code = exit_code(end)
        kind = "left" if code == 0 else "stopped" if code in STOPPED else "exit"
        return _write_report(report_fd, Report(kind, time.monotonic(), code), None)
    except KeyboardInterrupt:
        return _write_report(report_fd, Report("stopped", time.monotonic(), 130), None)
    except BaseException as error:
        link.lost_peer = failure.between_ranks(error)
        return _write_report(report_fd, _raised(error), error)
    return _write_report(report_fd, Report("returned", time.monotonic()), value if rank == 0 else None)


def _unpack(payload_fd: int) -> Callable[[], Any]:
    try:
        call, args = payload.read(payload_fd)
    except Exception as error:
        raise LaunchError(
            f"The function or an argument can't be loaded in a worker process: {type(error).__name__}: {error}. A worker "
            "imports everything that the script or the notebook doesn't define itself: make it importable from sys.path."
        ) from error
    return lambda: call(*args)


def _raised(error: BaseException) -> Report:
    # Leave out the frames of Footplate around the function, unless there are no others.
    whole, frames = error.__traceback__, error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in HIDDEN_FILES:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames or whole)).rstrip()
    mistake, passing = isinstance(error, FootplateError), failure.may_pass(error)
    return Report("raised", time.monotonic(), 1, failure.of_exception(error), text, mistake, passing)


def _write_report(report_fd: int, report: Report, value: Any) -> Report:
    """Write the report and a value that the supervisor can load; return the report."""
    try:
        payload.write(report_fd, report, value)
        if report.kind == "raised":
            # Many exceptions can be pickled, but not unpickled.
            payload.read_two(report_fd)[1]()
    except Exception as error:
        if report.kind == "raised":
            payload.write(report_fd, report, None)
            return report
        mistake = LaunchError(
            f"The result of the function, a {type(value).__name__}, can't be sent back: {type(error).__name__}: {error}. "
            "Return something that can be pickled, such as numbers, tensors or a state_dict."
        )
        return _write_report(report_fd, _raised(mistake), mistake)
    return report


def _open_streams() -> None:
    """Make standard streams that are written line by line. Standard input is empty."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable()


def _redirect(out: int, err: int) -> None:
    """Let the standard streams write there."""
    for fd, standard_fd in ((out, 1), (err, 2)):
        os.dup2(fd, standard_fd)
        os.close(fd)


def _reseed() -> None:
    """Seed the generators of Python and NumPy, so that processes don't draw the same numbers."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _share_cores() -> None:
    """Share the cores among the workers of a machine by setting torch's threads, unless OMP_NUM_THREADS is set."""
    if "torch" in sys.modules and "OMP_NUM_THREADS" not in os.environ:
        cores, workers = int(usable_cores()), int(os.environ["LOCAL_WORLD_SIZE"])
        sys.modules["torch"].set_num_threads(max(1, cores // workers))
