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

On the control socket, a worker sends single bytes: `ALIVE`, `PROGRESSED`, `SAVED`, `REPORT`. The supervisor sends one byte
when all ranks have reported. The end of the stream means that the supervisor is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
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
from footplate.launch import failure, payload, script, worker
from footplate.launch.rendezvous import host_store
from footplate.launch.worker_group import Report

HEARTBEAT_S = 1.0
ALIVE, PROGRESSED, SAVED, REPORT = b"a", b"p", b"s", b"r"
# Frames of these files are left out of tracebacks.
HIDDEN_FILES = {__file__, script.__file__, runpy.__file__, "<frozen runpy>"}
# Exit codes after SIGTERM and SIGINT.
STOPPED = {143, 130}


@dataclass(frozen=True)
class WorkerSpec:
    """The description of a worker.

    The descriptors that come with it: control, payload, report, standard output, standard error, [store].
    """

    rank: int
    environment: dict[str, str]
    argv: list[str]
    directory: str


def main(spec: WorkerSpec, fds: list[int]) -> NoReturn:
    """Run the worker. Never returns."""
    control, payload_fd, report_fd, out, err, *store = fds
    os.environ.update(spec.environment)
    # This machine doesn't have the directory.
    with contextlib.suppress(OSError):
        os.chdir(spec.directory)
    sys.argv = spec.argv
    _redirect(out, err)
    _reseed()
    _share_cores()
    answering.answer()
    link = SupervisorLink(socket.socket(fileno=control))
    worker.connect(link)

    kept_alive: list[Any] = []
    report = _run(payload_fd, report_fd, store, spec.rank, kept_alive)
    _flush()
    link.report()
    # Other ranks may still need the store that this process hosts.
    if store and report.kind not in ("raised", "exit"):
        link.released.wait()
    _exit(report.code)


class SupervisorLink:
    """The worker's end of the control socket, served by a thread."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._advanced = False
        self._sent_first = False
        self.released = threading.Event()
        threading.Thread(target=self._serve, name="footplate-heartbeat", daemon=True).start()

    def progressed(self) -> None:
        """Tell the supervisor at once the first time, and later with the next sign of life."""
        self._advanced = True
        if not self._sent_first:
            self._sent_first = True
            self._send(PROGRESSED)

    def saved(self) -> None:
        """Tell the supervisor at once."""
        self._send(SAVED)

    def report(self) -> None:
        """Tell the supervisor that the report is in its payload. Waits for a supervisor that is suspended."""
        while not self._send(REPORT):
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
                if not self._receive():
                    os.killpg(os.getpgrp(), signal.SIGKILL)
                self.released.set()

    def _receive(self) -> bool:
        try:
            return bool(self._control.recv(1))
        except OSError:
            return False


def _run(payload_fd: int, report_fd: int, store: list[int], rank: int, kept_alive: list[Any]) -> Report:
    """Call the function, and write a report of how it ended; return the report.

    `kept_alive` gets the objects that must outlive the call: the store.
    """
    try:
        kept_alive.extend(host_store(fd) for fd in store)
        value = _unpack(payload_fd)()
    except SystemExit as end:
        code = _exit_code(end)
        kind = "left" if code == 0 else "stopped" if code in STOPPED else "exit"
        return _write_report(report_fd, Report(kind, time.monotonic(), code), None)
    except KeyboardInterrupt:
        return _write_report(report_fd, Report("stopped", time.monotonic(), 130), None)
    except BaseException as error:
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


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _redirect(out: int, err: int) -> None:
    """Make these the standard streams, written line by line. Standard input is empty."""
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, standard_fd in ((null, 0), (out, 1), (err, 2)):
        os.dup2(fd, standard_fd)
        os.close(fd)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable()


def _reseed() -> None:
    """Seed NumPy's generator, so that forked processes don't draw the same numbers. Python's own does so itself."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _share_cores() -> None:
    """Share the cores among the workers of a machine by setting torch's threads, unless OMP_NUM_THREADS is set."""
    if "torch" in sys.modules and "OMP_NUM_THREADS" not in os.environ:
        cores, workers = int(usable_cores()), int(os.environ["LOCAL_WORLD_SIZE"])
        sys.modules["torch"].set_num_threads(max(1, cores // workers))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _exit(code: int) -> NoReturn:
    """End as an interpreter would, but don't tear down modules, where native libraries tend to crash."""
    for finish in (threading._shutdown, atexit._run_exitfuncs):  # pyright: ignore[reportAttributeAccessIssue]
        try:
            finish()
        except BaseException:
            traceback.print_exc()
    _flush()
    os._exit(code)
