"""Negotiation between the ranks: one connection from each rank to rank 0, and messages in both directions.

    rank r → rank 0    ["define", id, signature]       a signature, the first time it is used
                       ["ready", id, name, numbers]    this operation is ready on this rank
                       ["join"], ["wait", set, name], ["left"]
    rank 0 → rank r    ["run", set, names, numbers, signatures or null], ["refuse", set, name, text, mistake]
                       ["joined", last], ["failed", text, lost]

A message is a frame (`core/net/framing.py`). The data of "ready" and "run" of a small reduction are the bytes of its
tensors, which rank 0 reduces. So a small reduction takes one way there and one back, as long as a barrier.

`meeting.py` makes the connections. Rank 0's own submissions go straight into the table (`negotiation.py`). The thread
that completes an operation hands the answer to rank 0's engine, under one lock. So all ranks get the same answers in the
same order.

A connection that ends without "left" means that the process has died. Rank 0 then tells all ranks at once. When all ranks
have waited for `STUCK_S`, each for an operation that the others don't have, all of these operations are refused.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from footplate.compat.horovod.errors import HorovodInternalError, PeerLostError
from footplate.compat.horovod.meeting import gather, reach
from footplate.compat.horovod.negotiation import Answer, Joined, Key, Negotiation, Refuse, Run, Signature, fuse
from footplate.compat.horovod.operations import reduced
from footplate.core.net.framing import FrameDecoder, encode_frame

log = logging.getLogger(__name__)

TICK_S = 1.0
STUCK_S = 5.0
# A connection numbers this many signatures. After that, the numbers start from 0 again.
SIGNATURES = 4096


class Receiver(Protocol):
    """Receives the answers: a rank's engine."""

    def receive(self, answer: Answer) -> None:
        """Act on it."""
        ...

    def fail(self, error: HorovodInternalError) -> None:
        """Handle the end of all negotiation."""
        ...


class Link(Protocol):
    """A rank's connection to the table of negotiations."""

    def ready(self, name: str, signature: Signature, numbers: Sequence[int], data: bytes) -> None:
        """Submit an operation, with the bytes of its tensors if it is small."""
        ...

    def join(self) -> None:
        """Announce that this rank has no more data."""
        ...

    def wait(self, key: Key) -> None:
        """Announce that this rank waits for an operation and does nothing else."""
        ...

    def add_set(self, number: int, members: Sequence[int]) -> None:
        """Register a process set."""
        ...

    def close(self, leaving: bool) -> None:
        """Disconnect from the other ranks. `leaving`: tell them."""
        ...


def connect(rank: int, size: int, store: Any, receiver: Receiver) -> Link:
    """Connect a rank.

    Args:
        rank: which.
        size: how many ranks there are.
        store: a store of torch.distributed, in which the ranks find rank 0.
        receiver: gets the answers.
    """
    return Server(size, store, receiver) if rank == 0 else Client(rank, store, receiver)


class Server:
    """Rank 0's link. It has the table, and serves the other ranks in a thread."""

    def __init__(self, size: int, store: Any, receiver: Receiver) -> None:
        self._lock = threading.Lock()
        self._table = Negotiation(size)
        self._receiver = receiver
        self._connections: dict[int, socket.socket] = {}
        self._decoders: dict[int, FrameDecoder] = {}
        # The tensors of small operations that some ranks have submitted, by rank.
        self._packs: dict[Key, dict[int, bytes]] = {}
        self._signatures: dict[int, dict[int, Signature]] = {}
        self._heard, self._heard_at = 0, time.monotonic()
        self._closed = False
        if size > 1:
            self._connections = gather(size, store)
            self._decoders = {rank: FrameDecoder() for rank in self._connections}
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
                self._send_to_all(["failed", "rank 0 has shut Horovod down", False])
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
                        answers += self._read(key.data, selector)
                    self._answer(answers)
                    self._check_clock()

    def _read(self, rank: int, selector: selectors.BaseSelector) -> list[Answer]:
        """Handle all that a rank has sent, and the end of its connection."""
        connection, decoder = self._connections[rank], self._decoders[rank]
        piece = _receive(connection)
        decoder.feed(piece)
        answers: list[Answer] = []
        while (frame := decoder.next_frame()) is not None:
            answers += self._handle(rank, frame.message, frame.data)
        if not piece:
            selector.unregister(connection)
            connection.close()
            del self._connections[rank]
            self._handle_loss(rank)
        return answers

    def _handle(self, rank: int, message: list[Any], data: bytes) -> list[Answer]:
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

    def _handle_loss(self, rank: int) -> None:
        if not self._table.has_left(rank):
            text = f"the process of rank {rank} has ended"
            self._table.leave(rank, "has ended")
            self._send_to_all(["failed", text, True])
            self._receiver.fail(PeerLostError(_sentence(text)))

    def _check_clock(self) -> None:
        """Refuse operations that are stuck, and warn of operations that are late."""
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
        outgoing: dict[int, bytes] = {}
        for answer in answers:
            for rank in self._addressees(answer):
                outgoing[rank] = outgoing.get(rank, b"") + _encode(answer, rank)
        concerns_rank_0 = outgoing.pop(0, None) is not None
        for rank, frames in outgoing.items():
            self._send(rank, frames)
        if concerns_rank_0:
            for answer in answers:
                if 0 in self._addressees(answer):
                    self._receiver.receive(answer)

    def _with_data(self, answer: Answer) -> Answer:
        """The answer, with the reduced tensors if it runs a small operation."""
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

    def _send_to_all(self, message: list[Any]) -> None:
        for rank in list(self._connections):
            self._send(rank, encode_frame(message))

    def _send(self, rank: int, frames: bytes) -> None:
        if rank in self._connections:
            # If the process has died, reading from its connection shows it.
            with contextlib.suppress(OSError):
                self._connections[rank].sendall(frames)


class Client:
    """The link of any other rank: a connection, and a thread that receives the answers."""

    def __init__(self, rank: int, store: Any, receiver: Receiver) -> None:
        self._receiver = receiver
        self._lock = threading.Lock()
        self._ids: dict[Signature, int] = {}
        self._closed = False
        self._connection = reach(rank, store)
        _start(self._listen, receiver)

    def ready(self, name: str, signature: Signature, numbers: Sequence[int], data: bytes) -> None:
        with self._lock:
            definition = b""
            number = self._ids.get(signature)
            if number is None:
                if len(self._ids) == SIGNATURES:
                    self._ids.clear()
                number = self._ids[signature] = len(self._ids)
                definition = encode_frame(["define", number, signature.to_json()])
            self._send(definition + encode_frame(["ready", number, name, list(numbers)], data))

    def join(self) -> None:
        with self._lock:
            self._send(encode_frame(["join"]))

    def wait(self, key: Key) -> None:
        with self._lock:
            self._send(encode_frame(["wait", *key]))

    def add_set(self, number: int, members: Sequence[int]) -> None:
        # Rank 0 negotiates, and it knows the set already.
        pass

    def close(self, leaving: bool) -> None:
        with self._lock:
            self._closed = True
            if leaving:
                self._send(encode_frame(["left"]))
            _shut(self._connection)

    def _send(self, frames: bytes) -> None:
        # If rank 0 has died, `_listen` sees the end of the connection.
        with contextlib.suppress(OSError):
            self._connection.sendall(frames)

    def _listen(self) -> None:
        decoder = FrameDecoder()
        while piece := _receive(self._connection):
            decoder.feed(piece)
            while (frame := decoder.next_frame()) is not None:
                if frame.message[0] == "failed":
                    _, text, lost = frame.message
                    error = PeerLostError if lost else HorovodInternalError
                    self._receiver.fail(error(_sentence(text)))
                else:
                    self._receiver.receive(_decode(frame.message, frame.data))
        self._connection.close()
        if not self._closed:
            self._receiver.fail(PeerLostError(_sentence("the process of rank 0 has ended")))


def _encode(answer: Answer, rank: int) -> bytes:
    match answer:
        case Run():
            signatures = [signature.to_json() for signature in answer.signatures] if rank in answer.joined else None
            return encode_frame(["run", answer.process_set, answer.names, answer.numbers, signatures], answer.data)
        case Refuse():
            return encode_frame(["refuse", answer.process_set, answer.name, answer.text, answer.mistake])
        case Joined():
            return encode_frame(["joined", answer.last])


def _decode(message: list[Any], data: bytes) -> Answer:
    """The answer, with the parts that the receiving rank needs."""
    match message:
        case ["run", process_set, names, numbers, signatures]:
            decoded = tuple(Signature.from_json(signature) for signature in signatures or [])
            return Run(process_set, tuple(names), decoded, numbers, (), data=data)
        case ["refuse", process_set, name, text, mistake]:
            return Refuse(process_set, name, text, (), mistake)
        case ["joined", last]:
            return Joined(last)
    raise AssertionError(message)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _start(work: Callable[[], None], receiver: Receiver) -> None:
    """Run a function in a thread. If it raises, fail the receiver, so that no operation waits for it."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            log.exception("Horovod's negotiation has failed")
            receiver.fail(HorovodInternalError(f"Horovod's negotiation has failed: {error!r}"))

    threading.Thread(target=run, name="horovod-negotiation", daemon=True).start()


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}: this operation can't be completed."
