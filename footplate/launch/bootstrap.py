"""The life of a worker process, from the fork to its end.

1. Output goes to the pipes that the supervisor reads; the environment gets `RANK` and the rest.
2. A thread starts to send a sign of life each second. If the supervisor is gone, it kills this process and its children.
3. Rank 0 hosts the store of this attempt's rendezvous, on a socket that listens already: there is no port to race for.
4. The function is unpacked and called.
5. A report, with the result or the exception, goes home in a parcel. Rank 0 then waits until all ranks have reported:
   peers may still need its store.
6. Threads are joined and exit handlers run, as at the end of any Python program.

On the control socket, a worker sends single bytes: `ALIVE`, `PROGRESSED`, `REPORT`. What comes back is one byte, that
all have reported, or the end of the stream.
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
from footplate.hardware.machine import usable_cores
from footplate.launch import failure, parcel, script, worker
from footplate.launch.crew import Report
from footplate.launch.rendezvous import host_store

BEAT_S = 1.0
ALIVE, PROGRESSED, REPORT = b"a", b"p", b"r"
OURS = {__file__, script.__file__, runpy.__file__, "<frozen runpy>"}  # of no interest in a traceback
STOPPED = {143, 130}  # ended because it was asked to: by SIGTERM, by SIGINT


@dataclass(frozen=True)
class Order:
    """What a worker is to be. Its descriptors: control, payload, report, standard output, standard error, [store]."""

    rank: int
    environment: dict[str, str]
    argv: list[str]
    directory: str


def main(order: Order, fds: list[int]) -> NoReturn:
    """Run the worker; never returns."""
    control, payload, home, out, err, *store = fds
    os.environ.update(order.environment)
    with contextlib.suppress(OSError):  # not there on this machine
        os.chdir(order.directory)
    sys.argv = order.argv
    _redirect(out, err)
    _draw_anew()
    _share_cores()
    line = Line(socket.socket(fileno=control))
    worker.connect(line)
    held: list[Any] = []
    report = _run(payload, home, store, order.rank, held)
    _flush()
    line.report()
    if store and report.kind not in ("raised", "exit"):
        line.released.wait()
    _leave(report.code)


class Line:
    """The worker's end of the control socket, served by a thread."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._advanced = False
        self._told = False
        self.released = threading.Event()
        threading.Thread(target=self._serve, name="footplate-heartbeat", daemon=True).start()

    def progressed(self) -> None:
        """Say so at once the first time, and with the next sign of life ever after."""
        self._advanced = True
        if not self._told:
            self._told = True
            self._say(PROGRESSED)

    def report(self) -> None:
        """Say that the parcel is filled. Waits for a supervisor that is suspended."""
        while not self._say(REPORT):
            select.select([], [self._control], [], BEAT_S)

    def _say(self, what: bytes) -> bool:
        """Send a byte, unless so many wait to be read that there is no room."""
        try:
            return self._control.send(what, socket.MSG_DONTWAIT) == 1
        except BlockingIOError:
            return False
        except OSError:
            return True  # nobody is there, which the thread notices

    def _serve(self) -> None:
        while True:
            advanced, self._advanced = self._advanced, False
            self._say(PROGRESSED if advanced else ALIVE)
            if select.select([self._control], [], [], BEAT_S)[0]:
                if not self._receives():
                    os.killpg(os.getpgrp(), signal.SIGKILL)
                self.released.set()

    def _receives(self) -> bool:
        try:
            return bool(self._control.recv(1))
        except OSError:
            return False


def _run(payload: int, home: int, store: list[int], rank: int, held: list[Any]) -> Report:
    """Call the function; put into the parcel how it ended, and return that. What must outlive the call goes to `held`."""
    try:
        held.extend(host_store(fd) for fd in store)
        value = _unpack(payload)()
    except SystemExit as end:
        code = _exit_code(end)
        kind = "left" if code == 0 else "stopped" if code in STOPPED else "exit"
        return _send_home(home, Report(kind, time.monotonic(), code), None)
    except KeyboardInterrupt:
        return _send_home(home, Report("stopped", time.monotonic(), 130), None)
    except BaseException as error:
        return _send_home(home, _raised(error), error)
    return _send_home(home, Report("returned", time.monotonic()), value if rank == 0 else None)


def _unpack(payload: int) -> Callable[[], Any]:
    try:
        call, args = parcel.get(payload)
    except Exception as error:
        raise LaunchError(
            f"The function or an argument can't be loaded in a worker process: {type(error).__name__}: {error}. A worker "
            "imports what isn't defined in the script or the notebook itself: it must be importable from sys.path."
        ) from error
    return lambda: call(*args)


def _raised(error: BaseException) -> Report:
    own, frames = error.__traceback__, error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in OURS:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames or own)).rstrip()
    mistake, passing = isinstance(error, FootplateError), failure.may_pass(error)
    return Report("raised", time.monotonic(), 1, failure.of_exception(error), text, mistake, passing)


def _send_home(home: int, report: Report, value: Any) -> Report:
    """Fill the parcel with the report and a value that can be had back from it."""
    try:
        parcel.put(home, report, value)
        if report.kind == "raised":
            parcel.opened(home)[1]()  # many exceptions can be pickled and then not be made again
    except Exception as error:
        if report.kind == "raised":
            parcel.put(home, report, None)
            return report
        mistake = LaunchError(
            f"The result of the function, a {type(value).__name__}, can't be sent home: {type(error).__name__}: {error}. "
            "Return what can be pickled, such as numbers, tensors or a state_dict."
        )
        return _send_home(home, _raised(mistake), mistake)
    return report


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _redirect(out: int, err: int) -> None:
    """Make these the standard streams, written line by line; nothing can be read from standard input."""
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, place in ((null, 0), (out, 1), (err, 2)):
        os.dup2(fd, place)
        os.close(fd)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable()


def _draw_anew() -> None:
    """Processes forked from one must not draw the same numbers; Python's own generator sees to that itself."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _share_cores() -> None:
    """Torch's threads in all workers of a machine are to be as many as its cores, unless somebody has said otherwise."""
    if "torch" in sys.modules and "OMP_NUM_THREADS" not in os.environ:
        cores, workers = int(usable_cores()), int(os.environ["LOCAL_WORLD_SIZE"])
        sys.modules["torch"].set_num_threads(max(1, cores // workers))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _leave(code: int) -> NoReturn:
    """End as an interpreter would, save for tearing down its modules, in which native libraries are prone to crash."""
    for last in (threading._shutdown, atexit._run_exitfuncs):  # pyright: ignore[reportAttributeAccessIssue]
        try:
            last()
        except BaseException:
            traceback.print_exc()
    _flush()
    os._exit(code)
