"""The fork server: a process that has imported the slow libraries, and forks workers on request.

    supervisor                     fork server                       worker
    starts it          ─────►      imports torch and more
                       ◄─────      {"event": "ready"}
    fork + descriptors ─────►      forks                    ─────►   runs; talks to the supervisor directly
                       ◄─────      {"event": "forked", …}
    signal, kill       ─────►      does so                  ─────►
    idle               ─────►      waits for another launch
                       ◄─────      {"event": "ended", …}    ◄─────   ends, and is reaped

It stays between attempts, so a restart costs a fork instead of an import. It may also stay between launches
(`fork_server_pool.py`): after "idle", it ends itself if no request comes for a number of seconds. It is a clean
interpreter with one thread, which has touched no device: only such a process may be forked safely. The user's code never
runs in it.

Each worker leads a process group of its own. What the worker leaves there ends with it, loader processes too.

When the supervisor dies, the fork server kills its workers and ends. On Linux the kernel tells it, with SIGTERM; elsewhere
the end of the socket does. When the fork server itself is killed, the kernel kills the workers
(`process_lifetime.die_with`).
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
from footplate.launch.process_lifetime import die_with, kill_group

_BLOCKED_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}


def main(fd: int, parent: int, preload: Sequence[str]) -> None:
    """Run the process. `fd` is its socket to the supervisor, `parent` the supervisor's process id."""
    die_with(parent, signal.SIGTERM)
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    initial_variables = frozenset(os.environ)
    try:
        for module in preload:
            importlib.import_module(module)
        importlib.import_module("footplate.launch.bootstrap")
    except Exception:
        wire.send(connection, {"event": "unable", "text": traceback.format_exc()})
        return

    # What exists now is never garbage. A collection in a worker then doesn't touch its pages, and so doesn't copy them.
    gc.collect()
    gc.freeze()
    ForkServer(connection, initial_variables).serve()


class ForkServer:
    """Forks, signals and reaps workers, as `connection` asks, until it closes.

    Of the fork server's `initial_variables`, a worker keeps only those that its order names. Imports may have set more.
    """

    def __init__(self, connection: socket.socket, initial_variables: frozenset[str]) -> None:
        self._connection = connection
        self._initial_variables = initial_variables
        self._ends_at = math.inf
        # The supervisor's number for each worker, by process id.
        self._workers: dict[int, int] = {}

    def serve(self) -> None:
        """Serve until the supervisor is gone."""
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
            self._send_event({"event": "ready"})
            while True:
                ready = {key.fileobj for key, _ in selector.select(self._timeout())}
                if time.monotonic() > self._ends_at:
                    self._end()
                if woken in ready:
                    woken.recv(4096)
                    self._reap()
                if self._connection in ready:
                    received = wire.receive(self._connection)
                    if received is None:
                        self._end()
                    self._handle(*received)

    def _timeout(self) -> float | None:
        return None if math.isinf(self._ends_at) else max(0.0, self._ends_at - time.monotonic())

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        if message["do"] == "idle":
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

    def _fork(self, number: int, message: dict[str, Any], fds: list[int]) -> None:
        # Otherwise both processes would write what waits in the buffers.
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        try:
            if len(fds) < message["fds"]:
                raise OSError("too many open files")
            # Signals wait until the child has its own handlers.
            signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
            server_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._become_worker(server_pid, message["worker"], fds)
            self._workers[pid] = number
            self._send_event({"event": "forked", "number": number, "pid": pid})
            # The worker has set its own process group already, or has ended.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
        except OSError as error:
            text = f"could not be started: {error}"
            self._send_event({"event": "not forked", "number": number, "text": text})
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_SIGNALS)
            for fd in fds:
                os.close(fd)

    def _become_worker(self, server_pid: int, spec: dict[str, Any], fds: list[int]) -> NoReturn:
        from footplate.launch import bootstrap

        try:
            die_with(server_pid)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_SIGNALS)
            self._connection.close()
            for name in self._initial_variables - spec["environment"].keys():
                os.environ.pop(name, None)
            bootstrap.main(bootstrap.WorkerSpec(**spec), fds)
        except BaseException:
            traceback.print_exc()
        finally:
            # A worker must never return into the fork server's loop.
            os._exit(1)

    def _reap(self) -> None:
        for pid, number in list(self._workers.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._workers[pid]
                kill_group(pid)
                code = os.waitstatus_to_exitcode(status)
                self._send_event({"event": "ended", "number": number, "code": code, "at": time.monotonic()})

    def _send_event(self, message: dict[str, Any]) -> None:
        # If the supervisor is gone, sending fails, and the loop ends.
        with contextlib.suppress(OSError):
            wire.send(self._connection, message)

    def _end(self) -> NoReturn:
        for pid in self._workers:
            kill_group(pid)
        os._exit(0)
