"""Workers on this machine, which a fork server forks, and which are read through sockets and pipes.

For each worker there are

- a control socket: signs of life and "the report is there" come in, "all have reported" goes out, and its end tells the
  worker that its supervisor is gone (`bootstrap.py`);
- a pipe for standard output and one for standard error, or a pseudo-terminal in their place for rank 0;
- a payload for its report, and one payload with the function, which all workers read.

For each attempt there is a rendezvous (`rendezvous.py`). `begin` starts all ranks of an attempt. `run_share` starts those
that are the share of this machine (`cluster/agent.py`).

A worker that offers itself after the loss of another rank is *free*. For its attempt it has ended. The next attempt gives a
rank to each free worker that was started with the same variables, and preferably the slot that it had. All other ranks are
forked. A free worker that isn't needed is killed, or asked to end at the end of the launch.

When the fork server dies, its workers die with it. All of them are then reported as lost, and the next attempt begins with
a new fork server. A fork server that doesn't kill a worker within `KILL_S` after the request is killed itself.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from footplate.core.errors import LaunchError
from footplate.core.stacks import asking
from footplate.launch import bootstrap, fork_server_pool, payload, rendezvous, terminal, wire
from footplate.launch.dispatch import Waker, dispatch_ready
from footplate.launch.failure import of_exit
from footplate.launch.fork_server_pool import ServerKey, ServerProcess
from footplate.launch.rendezvous import Share
from footplate.launch.worker_group import Alive, Attempt, Ended, Event, Reported, Stacks, Stream, Wrote

KILL_S = 5.0
# A free worker from which nothing has come for this long gets no rank.
SILENT_S = 5.0
READ_BYTES = 1 << 16


@dataclass
class _Worker:
    """A worker, as the supervisor sees it.

    Attributes:
        rank: its rank in the attempt.
        control: its control socket.
        environment: the variables that it was started with.
        slot: the slot that it was started for.
        report_fd: of the payload for its report.
        outputs: by descriptor, the stream, and whether it is a pseudo-terminal.
        pid: its process id, once it is there.
        ended: whether it has ended, or is free.
        free: whether it waits for a rank of the next attempt.
        heard_at: when something arrived from it.
        killed_at: when the fork server was asked to kill it.
    """

    rank: int
    control: socket.socket
    environment: dict[str, str]
    slot: int
    report_fd: int = -1
    outputs: dict[int, tuple[Stream, bool]] = field(default_factory=dict)
    pid: int | None = None
    ended: bool = False
    free: bool = False
    heard_at: float = 0.0
    killed_at: float | None = None


@dataclass(frozen=True)
class Caller:
    """The settings that workers inherit from the process that launches them.

    Attributes:
        argv: the arguments of its script.
        path: where it finds modules, as absolute paths. Symbolic links stay, so that a module's file has one name.
        directory: its current directory; also a worker's, if the machine has it.
    """

    argv: list[str]
    path: list[str]
    directory: str

    @classmethod
    def of_this_process(cls) -> Caller:
        """Describe the present process."""
        return cls(list(sys.argv), [str(Path(entry).absolute()) for entry in sys.path], str(Path.cwd()))


class LocalWorkerGroup:
    """A `WorkerGroup` of processes of this machine.

    Args:
        payload_fd: descriptor of the payload with the function and its arguments.
        environment: variables for all workers, over those of this process.
        preload: modules that the fork server imports.
        caller: the process whose arguments, path and directory the workers get; None for this process.
        keep: leave the fork server to the next launch of this process (`fork_server_pool.py`).
    """

    def __init__(
        self,
        payload_fd: int,
        environment: Mapping[str, str],
        preload: Sequence[str],
        caller: Caller | None = None,
        keep: bool = False,
    ) -> None:
        self._payload_fd = payload_fd
        self._environment = dict(environment)
        self._preload = list(preload)
        self._caller = caller or Caller.of_this_process()
        self._keep = keep
        self._selector = selectors.DefaultSelector()
        self._waker = Waker(self._selector)
        self._server: ServerProcess | None = None
        # The workers, by number.
        self._workers: dict[int, _Worker] = {}
        self._events: list[Event] = []
        self._stacks: queue.SimpleQueue[Stacks] = queue.SimpleQueue()  # filled by a thread

    def present(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        return slots

    def leaving(self) -> bool:
        return False

    def begin(self, attempt: Attempt) -> None:
        size = len(attempt.slots)
        with rendezvous.listen(rendezvous.HOST, size) as store:
            tasks = rendezvous.free_addresses(rendezvous.HOST, size)
            ranks, address = tuple(range(size)), store.getsockname()[:2]
            self.run_share(Share(attempt, ranks, address, devices=attempt.slots, tasks=tasks), store)

    def run_share(self, share: Share, store: socket.socket | None) -> None:
        """Start the workers of a share of an attempt. `store` is the rendezvous's socket if rank 0 is one of them."""
        free = self._forget_workers()
        self.prepare()
        assigned = self._assign(share, free)
        for rank in share.ranks:
            self._start_worker(share, rank, store if rank == 0 else None, free, assigned.get(rank))
        for number in free.keys() - self._workers.keys():
            self._request(number, {"do": "kill"})
            self._close_control(free[number])

    def prepare(self) -> None:
        """Start the fork server, so that its imports are done, or have begun, when workers are started."""
        if self._server is None:
            self._server = server = self._get_server()
            self._selector.register(server.connection, selectors.EVENT_READ, lambda: self._read_server(server))

    def fileno(self) -> int:
        """A descriptor that is readable when `wait` has events."""
        return self._selector.fileno()

    def wait(self, timeout_s: float) -> list[Event]:
        dispatch_ready(self._selector, 0 if self._events else timeout_s)
        self._kill_stuck_server()
        while not self._stacks.empty():
            self._events.append(self._stacks.get())
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        self._waker.wake()

    def send(self, rank: int, signum: int) -> None:
        self._request_for_rank(rank, {"do": "signal", "signum": signum})

    def kill(self, rank: int) -> None:
        self._request_for_rank(rank, {"do": "kill"})
        for worker in self._workers.values():
            if worker.rank == rank and not worker.ended and worker.killed_at is None:
                worker.killed_at = time.monotonic()

    def ask_stacks(self, limit_s: float, native: bool) -> None:
        pids = {worker.pid: worker.rank for worker in self._workers.values() if worker.pid and not worker.ended}

        def run() -> None:
            for process in asking.ask(pids, limit_s, native):
                self._stacks.put(Stacks(pids[process.pid], process))
                self.wake()

        threading.Thread(target=run, name="footplate-asks", daemon=True).start()

    def release(self) -> None:
        for worker in self._workers.values():
            if not worker.ended:
                _tell(worker, {"do": "release"})

    def silence_s(self, rank: int) -> float:
        return 0.0

    def close(self) -> None:
        self._end_free_workers()
        if self._server is not None and self._is_reusable(self._server):
            self._selector.unregister(self._server.connection)
            fork_server_pool.put_back(self._server)
        elif self._server is not None:
            # The fork server takes its workers with it.
            self._server.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.process.wait(KILL_S)
            self._end_server(self._server)
        self._forget_workers()
        self._selector.close()
        self._waker.close()

    def _get_server(self) -> ServerProcess:
        """A fork server, from the pool if it has one that fits."""
        environment = self._common_environment()
        key = ServerKey.of_launch(self._caller.path, self._preload, environment)
        pooled = fork_server_pool.take(key) if self._keep else None
        return pooled or fork_server_pool.start(key, environment, self._caller.directory)

    def _is_reusable(self, server: ServerProcess) -> bool:
        all_ended = all(worker.ended and not worker.free for worker in self._workers.values())
        return self._keep and server.ready and server.sound and all_ended

    def _common_environment(self) -> dict[str, str]:
        return {**os.environ, **self._environment}

    def _assign(self, share: Share, free: Mapping[int, _Worker]) -> dict[int, int]:
        """Choose free workers for ranks of a share; return their numbers, by rank."""
        environment, now = self._common_environment(), time.monotonic()
        usable = {
            number: worker.slot
            for number, worker in free.items()
            if worker.environment == environment and now < worker.heard_at + SILENT_S
        }
        assigned: dict[int, int] = {}
        for may_change_slot in (False, True):
            for rank in share.ranks:
                slot = share.attempt.slots[rank]
                fits = (number for number, had in usable.items() if may_change_slot or had == slot)
                number = next(fits, None) if rank not in assigned else None
                if number is not None:
                    assigned[rank] = number
                    del usable[number]
        return assigned

    def _start_worker(
        self, share: Share, rank: int, store: socket.socket | None, free: Mapping[int, _Worker], number: int | None
    ) -> None:
        """Start a rank: in the free worker of this number, or else in a new one."""
        report_fd = payload.create()
        outputs, out, err = _open_outputs(share.attempt.terminals if rank == 0 else frozenset())
        call = {"rank": rank, "variables": rendezvous.environment(share, rank)}
        fds = [report_fd, out, err, *([store.fileno()] if store else [])]
        slot = share.attempt.slots[rank]
        if number is not None and _tell(free[number], {"do": "call", "call": call}, fds):
            worker = self._workers[number] = free[number]
            worker.free = worker.ended = False
            self._events.append(Alive(rank))
        else:
            worker = self._fork(slot, call, fds)
        for fd in {out, err}:
            os.close(fd)

        worker.rank, worker.slot, worker.report_fd, worker.outputs = rank, slot, report_fd, outputs
        for fd in outputs:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, lambda fd=fd: self._read_output(worker, fd))

    def _fork(self, slot: int, call: dict[str, Any], fds: list[int]) -> _Worker:
        """Have the fork server make a worker."""
        assert self._server is not None
        number = self._server.next_number()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        environment = self._common_environment()
        worker = self._workers[number] = _Worker(call["rank"], ours, environment, slot)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._read_control(worker))
        spec = {
            "environment": environment,
            "argv": self._caller.argv,
            "directory": self._caller.directory,
            "call": call,
        }
        fds = [theirs.fileno(), self._payload_fd, *fds]
        self._request(number, {"do": "fork", "worker": spec, "fds": len(fds)}, fds)
        theirs.close()
        return worker

    def _request(self, number: int, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if self._server is not None:
            self._server.request({**message, "number": number}, fds)

    def _request_for_rank(self, rank: int, message: dict[str, Any]) -> None:
        for number, worker in self._workers.items():
            if worker.rank == rank and not worker.ended:
                self._request(number, message)

    def _read_server(self, server: ServerProcess) -> None:
        """Handle a message of the fork server, or its end."""
        received = wire.receive(server.connection)
        if received is None:
            code = self._end_server(server)
            if code > 0 and not server.ready:
                raise LaunchError(
                    f"Worker processes can't be started: a new {sys.executable} ended with exit code {code} before it had "
                    "begun. Its standard error says why."
                )
            return
        message, _ = received
        if message["event"] == "ready":
            server.ready = True
        elif message["event"] == "unable":
            raise LaunchError(
                f"A worker process can't import what it needs ({', '.join(self._preload)}):\n{message['text']}"
            )
        elif message["event"] == "forked":
            worker = self._workers[message["number"]]
            worker.pid = message["pid"]
            self._events.append(Alive(worker.rank))
        elif message["event"] == "not forked":
            server.sound = False
            self._end(self._workers[message["number"]], None, time.monotonic(), message["text"])
        else:
            worker = self._workers.get(message["number"])
            # A free worker that was not needed is unknown by now.
            if worker is not None:
                worker.free = False
                self._end(worker, message["code"], message["at"])

    def _read_control(self, worker: _Worker) -> None:
        """Read all that is in a worker's control socket."""
        received = b""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while piece := worker.control.recv(4096):
                received += piece
            # The connection has closed. The fork server reports how the worker ended.
            self._selector.unregister(worker.control)
        if received:
            worker.heard_at = time.monotonic()
        if received and not worker.free:
            progressed, saved = bootstrap.PROGRESSED in received, bootstrap.SAVED in received
            self._events.append(Alive(worker.rank, progressed, saved))
        if bootstrap.REPORT in received:
            report, load = payload.read_two(worker.report_fd)
            self._events.append(Reported(worker.rank, report, load, worker.report_fd))
        # A worker that has died, or is being killed, may have offered itself before.
        if bootstrap.FREE in received and not worker.ended and worker.killed_at is None:
            self._end(worker, 1, time.monotonic())
            worker.free = True

    def _read_output(self, worker: _Worker, fd: int) -> bool:
        """Pass on one piece of output; return True if there was one."""
        stream, raw = worker.outputs[fd]
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            # A pseudo-terminal reports its end as an error.
            data = b""
        if not data:
            self._selector.unregister(fd)
            del worker.outputs[fd]
            os.close(fd)
            return False
        if raw:
            terminal.match_size(fd, stream)
        self._events.append(Wrote(worker.rank, stream, data, raw))
        return True

    def _end(self, worker: _Worker, code: int | None, at: float, text: str = "", all_ranks: bool = False) -> None:
        """Report the end of a worker, after the output and the report that it has left."""
        if worker.ended:
            return
        worker.ended = True
        if worker.control in self._selector.get_map():
            self._read_control(worker)
        for fd in list(worker.outputs):
            while self._read_output(worker, fd):
                pass
        self._events.append(Ended(worker.rank, code, at, text, all_ranks))

    def _end_server(self, server: ServerProcess) -> int:
        """End the fork server, and so its workers, if it still runs; return its exit code."""
        self._selector.unregister(server.connection)
        code = server.end()
        self._server = None
        text = f"all ranks were lost with the process that starts them, which {of_exit(code)[1]}"
        for worker in self._workers.values():
            worker.free = False
            self._end(worker, None, time.monotonic(), text, all_ranks=True)
        return code

    def _kill_stuck_server(self) -> None:
        """Kill a fork server that has not killed a worker in time."""
        now = time.monotonic()
        workers = self._workers.values()
        late = any(worker.killed_at and not worker.ended and now > worker.killed_at + KILL_S for worker in workers)
        if self._server is not None and late:
            self._server.process.kill()

    def _end_free_workers(self) -> None:
        """Ask free workers to end, and wait for that. Those that don't end in time end with the fork server."""
        for worker in self._workers.values():
            if worker.free:
                _tell(worker, {"do": "end"})
        until = time.monotonic() + KILL_S
        while any(worker.free for worker in self._workers.values()) and (left := until - time.monotonic()) > 0:
            dispatch_ready(self._selector, left)

    def _forget_workers(self) -> dict[int, _Worker]:
        """Forget the workers of the last attempt; return those that are free, by number."""
        free: dict[int, _Worker] = {}
        for number, worker in self._workers.items():
            os.close(worker.report_fd)
            for fd in worker.outputs:
                self._selector.unregister(fd)
                os.close(fd)
            if worker.free:
                free[number] = worker
            else:
                self._close_control(worker)
        self._workers = {}
        return free

    def _close_control(self, worker: _Worker) -> None:
        if worker.control in self._selector.get_map():
            self._selector.unregister(worker.control)
        worker.control.close()


def _tell(worker: _Worker, message: dict[str, Any], fds: Sequence[int] = ()) -> bool:
    """Send a message to a worker. Return False if it has gone."""
    try:
        wire.send(worker.control, message, fds)
    except OSError:
        return False
    return True


def _open_outputs(terminals: frozenset[Stream]) -> tuple[dict[int, tuple[Stream, bool]], int, int]:
    """Open pipes or pseudo-terminals for a worker's output.

    Returns:
        The ends to read, and the two descriptors that the worker writes to, which are one if both are terminals.
    """
    streams: tuple[Stream, ...] = ("stdout", "stderr")
    reads: dict[int, tuple[Stream, bool]] = {}
    writes: dict[Stream, int] = {}
    for stream in streams:
        raw = stream in terminals
        if raw and stream == "stderr" and "stdout" in terminals:
            writes[stream] = writes["stdout"]
            continue
        ours, theirs = terminal.open_pair(stream) if raw else os.pipe()
        reads[ours], writes[stream] = (stream, raw), theirs
    return reads, writes["stdout"], writes["stderr"]
