"""How the ranks negotiate: one connection from each rank to rank 0, and messages in both directions.

    rank r → rank 0    ["define", id, signature]       a signature, the first time it is used
                       ["ready", id, name, numbers]    this operation is ready here
                       ["join"], ["wait", set, name], ["left"]
    rank 0 → rank r    ["run", set, names, numbers, signatures or null], ["refuse", set, name, text, mistake]
                       ["joined", last], ["failed", text]

A message is JSON; behind "ready" and "run" of a small reduction come the bytes of its tensors, which rank 0 reduces: so it
takes one way there and one back, as long as a barrier.

`meeting.py` makes the connections. Rank 0's own words go straight into the table (`negotiation.py`), and what
follows is handed to its engine by whichever thread brought it about, under one lock: so all ranks get the same answers in
the same order.

A connection that ends without "left" is a process that has died: everybody is told at once. When all ranks have been
waiting for `STUCK_S`, each for something that the others don't have, all of it is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from footplate.compat.horovod.errors import HorovodInternalError, PeerLostError
from footplate.compat.horovod.meeting import gather, reach
from footplate.compat.horovod.negotiation import Answer, Joined, Key, Negotiation, Refuse, Run, Signature, fuse
from footplate.compat.horovod.operations import reduced

log = logging.getLogger(__name__)

TICK_S = 1.0
STUCK_S = 5.0
SIGNATURES = 4096  # remembered of a connection; then it begins anew
_SIZES = struct.Struct("!II")  # before each message: bytes of its JSON, and of what comes behind


class Receiver(Protocol):
    """Who gets the answers: a rank's engine."""

    def receive(self, answer: Answer) -> None:
        """Act on it."""
        ...

    def fail(self, error: HorovodInternalError) -> None:
        """Nothing can be negotiated any more."""
        ...


class Link(Protocol):
    """A rank's way to the table."""

    def ready(self, name: str, signature: Signature, numbers: Sequence[int], data: bytes) -> None:
        """Submit an operation; with its tensors, if it is small."""
        ...

    def join(self) -> None:
        """Say that this rank has no more data."""
        ...

    def wait(self, key: Key) -> None:
        """Say that this rank waits for an operation and does nothing else."""
        ...

    def add_set(self, number: int, members: Sequence[int]) -> None:
        """Make a process set known."""
        ...

    def close(self, leaving: bool) -> None:
        """Part from the others; `leaving`: tell them."""
        ...


def connect(rank: int, size: int, store: Any, receiver: Receiver) -> Link:
    """The link of a rank; `store` is one of torch.distributed's, and `receiver` gets the answers."""
    return Server(size, store, receiver) if rank == 0 else Client(rank, store, receiver)


class Server:
    """Rank 0's link: it has the table, and serves the others in a thread."""

    def __init__(self, size: int, store: Any, receiver: Receiver) -> None:
        self._lock = threading.Lock()
        self._table = Negotiation(size)
        self._receiver = receiver
        self._connections: dict[int, socket.socket] = {}
        self._streams: dict[int, _Stream] = {}
        self._packs: dict[Key, dict[int, bytes]] = {}  # of small operations that some ranks have submitted
        self._signatures: dict[int, dict[int, Signature]] = {}
        self._heard, self._heard_at = 0, time.monotonic()
        self._closed = False
        if size > 1:
            self._connections = gather(size, store)
            self._streams = {rank: _Stream() for rank in self._connections}
            self._signatures = {rank: {} for rank in self._connections}
            _start(self._serve, receiver)

    def ready(self, name: str, signature: Signature, numbers: Sequence[int], data: bytes) -> None:
        with self._lock:
            self._answer(self._submit(0, name, signature, numbers, data))

    def join(self) -> None:
        with self._lock:
            self._answer(self._table.join(0))

    def wait(self, key: Key) -> None:
        with self._lock:
            self._table.wait(0, key)

    def add_set(self, number: int, members: Sequence[int]) -> None:
        with self._lock:
            self._table.add_set(number, members)

    def close(self, leaving: bool) -> None:
        with self._lock:
            self._closed = True
            if leaving:
                self._tell_all(["failed", "rank 0 has shut Horovod down", False])
            for connection in self._connections.values():
                _shut(connection)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while True:
                ready = selector.select(TICK_S)
                with self._lock:
                    if self._closed:
                        for connection in self._connections.values():
                            connection.close()
                        return
                    answers: list[Answer] = []
                    for key, _ in ready:
                        answers += self._hear(key.data, selector)
                    self._answer(answers)
                    self._look()

    def _hear(self, rank: int, selector: selectors.BaseSelector) -> list[Answer]:
        """All that a rank has said; its end, if the connection ends."""
        connection = self._connections[rank]
        piece = _receive(connection)
        answers = [answer for told in self._streams[rank].feed(piece) for answer in self._take(rank, *told)]
        if not piece:
            selector.unregister(connection)
            connection.close()
            del self._connections[rank]
            self._lost(rank)
        return answers

    def _take(self, rank: int, message: list[Any], data: bytes) -> list[Answer]:
        match message:
            case ["ready", number, name, numbers]:
                return self._submit(rank, name, self._signatures[rank][number], numbers, data)
            case ["define", number, values]:
                if number == 0:
                    self._signatures[rank].clear()
                self._signatures[rank][number] = Signature.from_json(values)
            case ["join"]:
                return self._table.join(rank)
            case ["wait", process_set, name]:
                self._table.wait(rank, (process_set, name))
            case ["left"]:
                return self._table.leave(rank, "has shut Horovod down")
        return []

    def _submit(self, rank: int, name: str, signature: Signature, numbers: Sequence[int], data: bytes) -> list[Answer]:
        if data:
            self._packs.setdefault((signature.process_set, name), {})[rank] = data
        return self._table.submit(rank, name, signature, numbers, time.monotonic())

    def _lost(self, rank: int) -> None:
        if not self._table.has_left(rank):
            text = f"the process of rank {rank} has ended"
            self._table.leave(rank, "has ended")
            self._tell_all(["failed", text, True])
            self._receiver.fail(PeerLostError(_sentence(text)))

    def _look(self) -> None:
        """What is due by the clock."""
        now = time.monotonic()
        if self._table.heard != self._heard:
            self._heard, self._heard_at = self._table.heard, now
        elif now - self._heard_at > STUCK_S:
            self._answer(self._table.stuck())
        for text in self._table.stalled(now):
            log.warning(
                "One or more tensors were submitted to be reduced, gathered or broadcast by some ranks only: %s", text
            )

    def _answer(self, answers: Iterable[Answer]) -> None:
        answers = [self._with_data(answer) for answer in fuse(answers)]
        told: dict[int, bytes] = {}
        for answer in answers:
            for rank in self._addressees(answer):
                told[rank] = told.get(rank, b"") + _encode(answer, rank)
        mine = told.pop(0, None) is not None
        for rank, encoded in told.items():
            self._tell(rank, encoded)
        if mine:
            for answer in answers:
                if 0 in self._addressees(answer):
                    self._receiver.receive(answer)

    def _with_data(self, answer: Answer) -> Answer:
        """A small operation that runs, with what its tensors become."""
        match answer:
            case Run(process_set, (name, *_), (signature, *_)) if signature.small:
                packs = self._packs.pop((process_set, name))
                return replace(answer, data=reduced(signature, [packs[rank] for rank in sorted(packs)]))
            case Refuse():
                self._packs.pop((answer.process_set, answer.name), None)
        return answer

    def _addressees(self, answer: Answer) -> Iterable[int]:
        match answer:
            case Run(members=members):
                return members
            case Refuse(ranks=ranks):
                return ranks
        return (0, *self._connections)

    def _tell_all(self, message: list[Any]) -> None:
        for rank in list(self._connections):
            self._tell(rank, _encoded(message))

    def _tell(self, rank: int, encoded: bytes) -> None:
        if rank in self._connections:
            with contextlib.suppress(OSError):  # it has died, of which its connection tells
                self._connections[rank].sendall(encoded)


class Client:
    """The link of any other rank: a connection, and a thread that takes the answers."""

    def __init__(self, rank: int, store: Any, receiver: Receiver) -> None:
        self._receiver = receiver
        self._lock = threading.Lock()
        self._ids: dict[Signature, int] = {}
        self._closed = False
        self._connection = reach(rank, store)
        _start(self._listen, receiver)

    def ready(self, name: str, signature: Signature, numbers: Sequence[int], data: bytes) -> None:
        with self._lock:
            defined = b""
            number = self._ids.get(signature)
            if number is None:
                if len(self._ids) == SIGNATURES:
                    self._ids.clear()
                number = self._ids[signature] = len(self._ids)
                defined = _encoded(["define", number, signature.to_json()])
            self._send(defined + _encoded(["ready", number, name, list(numbers)], data))

    def join(self) -> None:
        with self._lock:
            self._send(_encoded(["join"]))

    def wait(self, key: Key) -> None:
        with self._lock:
            self._send(_encoded(["wait", *key]))

    def add_set(self, number: int, members: Sequence[int]) -> None:
        pass  # rank 0 knows it

    def close(self, leaving: bool) -> None:
        with self._lock:
            self._closed = True
            if leaving:
                self._send(_encoded(["left"]))
            _shut(self._connection)

    def _send(self, encoded: bytes) -> None:
        with contextlib.suppress(OSError):  # rank 0 has died, of which the connection tells
            self._connection.sendall(encoded)

    def _listen(self) -> None:
        stream = _Stream()
        while piece := _receive(self._connection):
            for message, data in stream.feed(piece):
                if message[0] == "failed":
                    error = PeerLostError if message[2] else HorovodInternalError
                    self._receiver.fail(error(_sentence(message[1])))
                else:
                    self._receiver.receive(_decode(message, data))
        self._connection.close()
        if not self._closed:
            self._receiver.fail(PeerLostError(_sentence("the process of rank 0 has ended")))


class _Stream:
    """Pieces of a stream, put together to messages with what comes behind them."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[tuple[list[Any], bytes]]:
        have, start = self._rest + piece, 0
        found: list[tuple[list[Any], bytes]] = []
        while len(have) >= start + _SIZES.size:
            text_bytes, data_bytes = _SIZES.unpack_from(have, start)
            begin = start + _SIZES.size
            middle, end = begin + text_bytes, begin + text_bytes + data_bytes
            if len(have) < end:
                break
            found.append((json.loads(have[begin:middle]), have[middle:end]))
            start = end
        self._rest = have[start:]
        return found


def _encode(answer: Answer, rank: int) -> bytes:
    match answer:
        case Run():
            signatures = [one.to_json() for one in answer.signatures] if rank in answer.joined else None
            return _encoded(["run", answer.process_set, answer.names, answer.numbers, signatures], answer.data)
        case Refuse():
            return _encoded(["refuse", answer.process_set, answer.name, answer.text, answer.mistake])
        case Joined():
            return _encoded(["joined", answer.last])


def _decode(message: list[Any], data: bytes) -> Answer:
    """The answer as far as the rank that gets it needs it."""
    match message:
        case ["run", process_set, names, numbers, signatures]:
            found = tuple(Signature.from_json(one) for one in signatures or [])
            return Run(process_set, tuple(names), found, numbers, (), data=data)
        case ["refuse", process_set, name, text, mistake]:
            return Refuse(process_set, name, text, (), mistake)
        case ["joined", last]:
            return Joined(last)
    raise AssertionError(message)


def _encoded(message: list[Any], data: bytes = b"") -> bytes:
    text = json.dumps(message, separators=(",", ":")).encode()
    return _SIZES.pack(len(text), len(data)) + text + data


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _start(work: Callable[[], None], receiver: Receiver) -> None:
    """Run it in a thread; should it raise, nobody is to wait for what it doesn't do any more."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            log.exception("Horovod's negotiation has failed")
            receiver.fail(HorovodInternalError(f"Horovod's negotiation has failed: {error!r}"))

    threading.Thread(target=run, name="horovod-negotiation", daemon=True).start()


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}: this operation can't be completed."
