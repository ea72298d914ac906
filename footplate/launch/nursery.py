"""The nursery: a process that has imported what is slow, and forks workers when asked.

    supervisor                     nursery                           worker
    starts it          ─────►      imports torch and more
                       ◄─────      {"event": "ready"}
    fork + descriptors ─────►      forks                    ─────►   lives; talks to the supervisor by itself
                       ◄─────      {"event": "born", …}
    signal, kill       ─────►      does so                  ─────►
    rest               ─────►      waits for another launch
                       ◄─────      {"event": "ended", …}    ◄─────   ends, and is reaped

It stays between attempts, so that a restart costs a fork instead of an import, and may stay between launches
(`nurseries.py`): told to rest, it ends by itself if nothing is asked of it for so many seconds. It is a clean interpreter
with one thread, which has touched no device: only such a process may be forked safely. The user's code is never in it.

Each worker leads a process group of its own, and what it has left there ends with it: loader processes, too.

When the supervisor dies, the kernel tells the nursery (SIGTERM; elsewhere than on Linux, the end of the socket does), and
it kills its workers and ends. When the nursery itself is killed, the kernel kills the workers (`family.die_with`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from footplate.launch import wire
from footplate.launch.family import die_with, kill_group

_HELD = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}


def main(fd: int, parent: int, preload: Sequence[str]) -> None:
    """What the process runs: `fd` is its socket to the supervisor, `parent` the supervisor's id."""
    die_with(parent, signal.SIGTERM)
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    begun_with = frozenset(os.environ)
    try:
        for module in preload:
            importlib.import_module(module)
        importlib.import_module("footplate.launch.bootstrap")
    except Exception:
        wire.send(connection, {"event": "unable", "text": traceback.format_exc()})
        return
    gc.collect()
    gc.freeze()  # what is here now is never garbage: collecting in a worker needn't touch, and so copy, its pages
    Nursery(connection, begun_with).serve()


class Nursery:
    """Forks, signals and reaps, as asked through `connection`, until it closes.

    Of the variables that the nursery has `begun_with`, a worker gets those that its order names; imports may have set more.
    """

    def __init__(self, connection: socket.socket, begun_with: frozenset[str]) -> None:
        self._connection = connection
        self._begun_with = begun_with
        self._ends_at = math.inf
        self._workers: dict[int, int] = {}  # process id: the supervisor's number for it

    def serve(self) -> None:
        """Until the supervisor is gone."""
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            self._tell({"event": "ready"})
            while True:
                ready = {key.fileobj for key, _ in selector.select(self._may_wait())}
                if time.monotonic() > self._ends_at:
                    self._end()
                if woken in ready:
                    woken.recv(4096)
                    self._reap()
                if self._connection in ready:
                    received = wire.receive(self._connection)
                    if received is None:
                        self._end()
                    self._heed(*received)

    def _may_wait(self) -> float | None:
        return None if math.isinf(self._ends_at) else max(0.0, self._ends_at - time.monotonic())

    def _heed(self, message: dict[str, Any], fds: list[int]) -> None:
        if message["do"] == "rest":
            self._ends_at = time.monotonic() + message["seconds"]
            return
        self._ends_at = math.inf
        number = message["number"]
        if message["do"] == "fork":
            self._fork(number, message, fds)
            return
        for pid in [pid for pid, known in self._workers.items() if known == number]:
            if message["do"] == "kill":
                kill_group(pid)
            else:
                os.kill(pid, message["signum"])

    def _fork(self, number: int, order: dict[str, Any], fds: list[int]) -> None:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()  # or both processes would write what waits in it
        try:
            if len(fds) < order["fds"]:
                raise OSError("too many open files")
            signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)  # until the child has handlers of its own
            nursery = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._become_worker(nursery, order, fds)
            self._workers[pid] = number
            self._tell({"event": "born", "number": number})
            with contextlib.suppress(OSError):  # it has done so itself, or ended
                os.setpgid(pid, pid)
        except OSError as error:
            self._tell({"event": "unborn", "number": number, "text": f"could not be started: {error}"})
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
            for fd in fds:
                os.close(fd)

    def _become_worker(self, nursery: int, order: dict[str, Any], fds: list[int]) -> NoReturn:
        from footplate.launch import bootstrap

        try:
            die_with(nursery)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
            self._connection.close()
            for name in self._begun_with - order["order"]["environment"].keys():
                os.environ.pop(name, None)
            bootstrap.main(bootstrap.Order(**order["order"]), fds)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # never back into the nursery's loop

    def _reap(self) -> None:
        for pid, number in list(self._workers.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._workers[pid]
                kill_group(pid)
                code = os.waitstatus_to_exitcode(status)
                self._tell({"event": "ended", "number": number, "code": code, "at": time.monotonic()})

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone, which ends the loop
            wire.send(self._connection, message)

    def _end(self) -> NoReturn:
        for pid in self._workers:
            kill_group(pid)
        os._exit(0)
