"""Workers on this machine: forked by a nursery, heard through sockets and pipes.

For each worker there are
- a control socket: signs of life and "the report is there" come in, "all have reported" goes out, and its end tells the
  worker that nobody looks after it any more;
- a pipe for standard output and one for standard error, or a pseudo-terminal in place of them for rank 0;
- a parcel for its report; and one parcel with the function that all of them read.

For each attempt there is a rendezvous (`rendezvous.py`). `begin` carries all of its ranks; `carry`, those of them that are
the share of this machine (`cluster/agent.py`).

When the nursery dies, its workers die with it; all of them are then reported as lost, and the next attempt begins with a
new nursery. One that doesn't heed a request to kill within `KILL_S` is killed itself.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from footplate.core.errors import LaunchError
from footplate.launch import bootstrap, nurseries, parcel, rendezvous, terminal, wire
from footplate.launch.crew import Alive, Attempt, Ended, Event, Reported, Stream, Wrote
from footplate.launch.failure import of_exit
from footplate.launch.nurseries import Kind, Nursery
from footplate.launch.rendezvous import Share
from footplate.launch.waiting import Bell, heed

KILL_S = 5.0
PIECE = 1 << 16  # bytes read at once


@dataclass
class _Worker:
    """A worker as seen from here. `outputs`: descriptor, stream, whether a pseudo-terminal."""

    rank: int
    control: socket.socket
    home: int
    outputs: dict[int, tuple[Stream, bool]]
    ended: bool = False
    killed_at: float | None = None


@dataclass(frozen=True)
class Caller:
    """What workers have in common with the process that launches them.

    Attributes:
        argv: the arguments of its script.
        path: where it finds modules, as absolute paths.
        directory: its current one; a worker is in it, too, if it is there.
    """

    argv: list[str]
    path: list[str]
    directory: str

    @classmethod
    def here(cls) -> Caller:
        """As the present process is."""
        return cls(list(sys.argv), [str(Path(entry or ".").resolve()) for entry in sys.path], str(Path.cwd()))


class LocalCrew:
    """A `Crew` of processes of this machine.

    Args:
        payload: descriptor of the parcel with the function and its arguments.
        environment: variables for all workers, over those of this process.
        preload: modules that the nursery imports.
        caller: whom the workers are to take after; None for this process.
        keep: leave the nursery to the next launch of this process (`nurseries.py`).
    """

    def __init__(
        self,
        payload: int,
        environment: Mapping[str, str],
        preload: Sequence[str],
        caller: Caller | None = None,
        keep: bool = False,
    ) -> None:
        self._payload = payload
        self._environment = dict(environment)
        self._preload = list(preload)
        self._caller = caller or Caller.here()
        self._keep = keep
        self._selector = selectors.DefaultSelector()
        self._bell = Bell(self._selector)
        self._nursery: Nursery | None = None
        self._workers: dict[int, _Worker] = {}  # by number
        self._events: list[Event] = []

    def begin(self, attempt: Attempt) -> None:
        size = len(attempt.slots)
        with rendezvous.listen(rendezvous.HOST, size) as store:
            tasks = rendezvous.free_addresses(rendezvous.HOST, size)
            ranks, at = tuple(range(size)), store.getsockname()[:2]
            self.carry(Share(attempt, ranks, at, devices=attempt.slots, tasks=tasks), store)

    def carry(self, share: Share, store: socket.socket | None) -> None:
        """Start the workers of a part of an attempt. `store` is the rendezvous's socket where rank 0 is one of them."""
        self._forget_workers()
        self.prepare()
        for rank in share.ranks:
            self._start_worker(share, rank, store if rank == 0 else None)

    def prepare(self) -> None:
        """Start the nursery, so that its imports are done, or under way, when workers are to be started."""
        if self._nursery is None:
            self._nursery = nursery = self._take_nursery()
            self._selector.register(nursery.connection, selectors.EVENT_READ, lambda: self._hear_nursery(nursery))

    def fileno(self) -> int:
        """A descriptor that can be read from when `wait` has something to take."""
        return self._selector.fileno()

    def wait(self, timeout_s: float) -> list[Event]:
        heed(self._selector, 0 if self._events else timeout_s)
        self._press()
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        self._bell.ring()

    def send(self, rank: int, signum: int) -> None:
        self._ask(rank, {"do": "signal", "signum": signum})

    def kill(self, rank: int) -> None:
        self._ask(rank, {"do": "kill"})
        for worker in self._workers.values():
            if worker.rank == rank and worker.killed_at is None:
                worker.killed_at = time.monotonic()

    def release(self) -> None:
        for worker in self._workers.values():
            with contextlib.suppress(OSError):
                worker.control.send(b"!")

    def silence_s(self, rank: int) -> float:
        return 0.0

    def close(self) -> None:
        if self._nursery is not None and self._may_be_kept(self._nursery):
            self._selector.unregister(self._nursery.connection)
            nurseries.give(self._nursery)
        elif self._nursery is not None:
            self._nursery.process.terminate()  # it takes its workers with it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._nursery.process.wait(KILL_S)
            self._end_nursery(self._nursery)
        self._forget_workers()
        self._selector.close()
        self._bell.close()

    def _take_nursery(self) -> Nursery:
        environment = self._environment_of_all()
        kind = Kind.of(self._caller.path, self._preload, environment)
        kept = nurseries.take(kind) if self._keep else None
        return kept or nurseries.start(kind, environment, self._caller.directory)

    def _may_be_kept(self, nursery: Nursery) -> bool:
        everybody_ended = all(worker.ended for worker in self._workers.values())
        return self._keep and nursery.ready and nursery.sound and everybody_ended

    def _environment_of_all(self) -> dict[str, str]:
        return {**os.environ, **self._environment}

    def _start_worker(self, share: Share, rank: int, store: socket.socket | None) -> None:
        assert self._nursery is not None
        number = self._nursery.number()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        outputs, out, err = _open_outputs(share.attempt.terminals if rank == 0 else frozenset())
        worker = _Worker(rank, ours, parcel.empty(), outputs)
        self._workers[number] = worker
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._hear_worker(worker))
        for fd in outputs:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, lambda fd=fd: self._read(worker, fd))
        order = {
            "rank": rank,
            "environment": {**self._environment_of_all(), **rendezvous.environment(share, rank)},
            "argv": self._caller.argv,
            "directory": self._caller.directory,
        }
        fds = [theirs.fileno(), self._payload, worker.home, out, err, *([store.fileno()] if store else [])]
        self._order(number, {"do": "fork", "order": order, "fds": len(fds)}, fds)
        theirs.close()
        for fd in {out, err}:
            os.close(fd)

    def _order(self, number: int, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if self._nursery is not None:
            self._nursery.order({**message, "number": number}, fds)

    def _ask(self, rank: int, message: dict[str, Any]) -> None:
        for number, worker in self._workers.items():
            if worker.rank == rank and not worker.ended:
                self._order(number, message)

    def _hear_nursery(self, nursery: Nursery) -> None:
        received = wire.receive(nursery.connection)
        if received is None:
            code = self._end_nursery(nursery)
            if code > 0 and not nursery.ready:
                raise LaunchError(
                    f"Worker processes can't be started: a new {sys.executable} ended with exit code {code} before it had "
                    "begun. What it wrote to standard error says why."
                )
            return
        message, _ = received
        if message["event"] == "ready":
            nursery.ready = True
        elif message["event"] == "unable":
            raise LaunchError(
                f"A worker process can't import what it needs ({', '.join(self._preload)}):\n{message['text']}"
            )
        elif message["event"] == "born":
            self._events.append(Alive(self._workers[message["number"]].rank))
        elif message["event"] == "unborn":
            nursery.sound = False
            self._end(self._workers[message["number"]], None, time.monotonic(), message["text"])
        else:
            self._end(self._workers[message["number"]], message["code"], message["at"])

    def _hear_worker(self, worker: _Worker) -> None:
        """Read a worker's control socket until nothing more is there."""
        heard = b""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while piece := worker.control.recv(4096):
                heard += piece
            self._selector.unregister(worker.control)  # its end; how it ended, the nursery tells
        if heard:
            self._events.append(Alive(worker.rank, progressed=bootstrap.PROGRESSED in heard))
        if bootstrap.REPORT in heard:
            report, load = parcel.opened(worker.home)
            self._events.append(Reported(worker.rank, report, load, worker.home))

    def _read(self, worker: _Worker, fd: int) -> bool:
        """Pass on one piece of output; whether there was one."""
        stream, raw = worker.outputs[fd]
        try:
            data = os.read(fd, PIECE)
        except BlockingIOError:
            return False
        except OSError:  # the end of a pseudo-terminal
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

    def _end(self, worker: _Worker, code: int | None, at: float, text: str = "", whole: bool = False) -> None:
        """A worker is no more: take what it has left behind, then say so."""
        if worker.ended:
            return
        worker.ended = True
        if worker.control in self._selector.get_map():
            self._hear_worker(worker)
        for fd in list(worker.outputs):
            while self._read(worker, fd):
                pass
        self._events.append(Ended(worker.rank, code, at, text, whole))

    def _end_nursery(self, nursery: Nursery) -> int:
        """The nursery has died or is to die, and its workers with it; returns its exit code."""
        self._selector.unregister(nursery.connection)
        code = nursery.end()
        self._nursery = None
        text = f"all ranks were lost with the process that starts them, which {of_exit(code)[1]}"
        for worker in self._workers.values():
            self._end(worker, None, time.monotonic(), text, whole=True)
        return code

    def _press(self) -> None:
        """Kill a nursery that doesn't do as it was asked."""
        now = time.monotonic()
        late = (
            one for one in self._workers.values() if one.killed_at and not one.ended and now > one.killed_at + KILL_S
        )
        if self._nursery is not None and next(late, None):
            self._nursery.process.kill()

    def _forget_workers(self) -> None:
        for worker in self._workers.values():
            if worker.control in self._selector.get_map():
                self._selector.unregister(worker.control)
            worker.control.close()
            os.close(worker.home)
            for fd in worker.outputs:
                self._selector.unregister(fd)
                os.close(fd)
        self._workers = {}


def _open_outputs(terminals: frozenset[Stream]) -> tuple[dict[int, tuple[Stream, bool]], int, int]:
    """Where a worker's output is read, and the two descriptors that it writes to, which are one if both are terminals."""
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
