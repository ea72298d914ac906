"""The negotiation table of rank 0: ranks announce operations by name, in any order, and all ranks start them in one order.

A collective works only if all ranks call it together. The order in which gradients become ready, or in which a program
submits tensors, may differ between ranks. And after a mistake (another name, another shape) all ranks would wait without
end. So each rank tells rank 0 which operation it has ready, with the operation's signature. Rank 0 keeps this table. When
the last rank has announced an operation:

    the signatures agree   →  Run       all ranks start it; the order of these answers is the order on all ranks
    the signatures differ  →  Refuse    all ranks get an error that says which rank has what

    a rank has joined      →  it counts as ready, and takes part in sums with zeros
    a rank has left        →  Refuse    the operation can't be completed
    all ranks wait, each for another operation  →  Refuse  (`stuck`)

A small operation needs no transfer: its values come with the announcements, and the result goes back with the answer.

This module is only the table, without sockets or threads: each method returns the answers that follow from a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# Sums that are ready together are fused up to this size. It is Horovod's default.
FUSION_BYTES = 128 * 2**20
# Tensors up to this size are sent with the announcement.
SMALL_BYTES = 16 * 2**10
WARN_AFTER_S = 60.0

# The number of the process set of all ranks.
GLOBAL = 0
# Reductions that a rank that has joined takes part in with zeros.
SUMS = ("average", "sum")
EXTREMES = ("min", "max", "product")

# The number of a process set, and the name of an operation.
Key = tuple[int, str]


@dataclass(frozen=True)
class Signature:
    """The properties of an operation that all ranks must agree on.

    Attributes:
        kind: allreduce, allgather, broadcast, alltoall, reducescatter or barrier.
        dtypes: the type of each tensor, such as "float32".
        shapes: the shape of each tensor; without the first dimension if it may differ (allgather, alltoall).
        itemsizes: bytes of an element of each tensor.
        device: "cpu" or "cuda".
        op: average, sum, adasum, min, max or product; empty without a reduction.
        root: the rank whose value is broadcast; -1 without a broadcast.
        prescale: multiplies the tensors before a reduction.
        postscale: multiplies the tensors after a reduction.
        process_set: the number of the process set.
        parts: the names of the tensors, for error texts; empty if the operation's name is enough.
    """

    kind: str
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    itemsizes: tuple[int, ...] = ()
    device: str = "cpu"
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: int = GLOBAL
    parts: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; a left-out first dimension counts as 1."""
        return sum(math.prod(shape) * itemsize for shape, itemsize in zip(self.shapes, self.itemsizes, strict=True))

    @property
    def small(self) -> bool:
        """True if the tensors are sent with the announcement, which is faster than a transfer of their own."""
        reduced = self.kind == "allreduce" and self.op in SUMS + EXTREMES and self.device == "cpu"
        return reduced and 0 < self.nbytes <= SMALL_BYTES

    def to_json(self) -> list[Any]:
        return [getattr(self, name) for name in self.__dataclass_fields__]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Signature:
        fields = dict(zip(cls.__dataclass_fields__, values, strict=True))
        for name in ("dtypes", "itemsizes"):
            fields[name] = tuple(fields[name])
        return cls(**{**fields, "shapes": tuple(tuple(shape) for shape in fields["shapes"])})


@dataclass(frozen=True)
class Run:
    """An answer: all members of the process set start these operations, fused into one.

    Attributes:
        process_set: the number of the process set.
        names: the names of the operations.
        signatures: the signature of each operation.
        numbers: the rows or splits of each member, if there is one operation.
        members: the ranks of the process set.
        joined: the members that have joined; they take part with zeros.
        data: for a small operation, the reduced tensors of all ranks.
    """

    process_set: int
    names: tuple[str, ...]
    signatures: tuple[Signature, ...]
    numbers: tuple[tuple[int, ...], ...]
    members: tuple[int, ...]
    joined: tuple[int, ...] = ()
    data: bytes = b""


@dataclass(frozen=True)
class Refuse:
    """An answer: the ranks that have submitted this operation get an error.

    Attributes:
        process_set: the number of the process set.
        name: the name of the operation.
        text: the text of the error.
        ranks: the ranks that have submitted the operation.
        mistake: True for a mistake of the program, False if a rank is missing.
    """

    process_set: int
    name: str
    text: str
    ranks: tuple[int, ...]
    mistake: bool = True


@dataclass(frozen=True)
class Joined:
    """An answer: all ranks have joined, and `last` was the last of them."""

    last: int


Answer = Run | Refuse | Joined


@dataclass
class _Entry:
    """An operation that some ranks have submitted.

    Attributes:
        since: when the first rank has submitted it.
        submitted: signature and numbers of each rank.
        warned: True if a warning was given that it waits.
    """

    since: float
    submitted: dict[int, tuple[Signature, tuple[int, ...]]] = field(default_factory=dict)
    warned: bool = False


class Negotiation:
    """The table; see the module's docstring.

    Args:
        size: the number of ranks.

    Attributes:
        heard: the number of messages so far. While it stays the same, nothing changes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._sets: dict[int, tuple[int, ...]] = {GLOBAL: tuple(range(size))}
        self._entries: dict[Key, _Entry] = {}
        self._joined: list[int] = []
        self._left: dict[int, str] = {}
        self._waiting: dict[int, Key] = {}
        self.heard = 0

    def add_set(self, number: int, members: Sequence[int]) -> None:
        """Add a process set, before any rank submits an operation for it."""
        self._sets[number] = tuple(members)

    def submit(self, rank: int, name: str, signature: Signature, numbers: Sequence[int], now: float) -> list[Answer]:
        """Record that a rank has an operation ready."""
        self.heard += 1
        key = (signature.process_set, name)
        entry = self._entries.setdefault(key, _Entry(now))
        entry.submitted[rank] = (signature, tuple(numbers))
        return self._answers(key)

    def join(self, rank: int) -> list[Answer]:
        """Record that a rank has no more data. It takes part in sums with zeros until all ranks have joined."""
        self.heard += 1
        self._joined.append(rank)
        answers = [answer for key in list(self._entries) for answer in self._answers(key)]
        if len(self._joined) == self._size:
            answers.append(Joined(rank))
            self._joined = []
        return answers

    def wait(self, rank: int, key: Key) -> None:
        """Record that a rank only waits for this operation."""
        if key in self._entries and self._waiting.get(rank) != key:
            self.heard += 1
            self._waiting[rank] = key

    def leave(self, rank: int, why: str) -> list[Answer]:
        """Record that a rank has left. `why` continues a sentence that begins with "rank 1"."""
        self.heard += 1
        self._left[rank] = why
        return [answer for key in list(self._entries) for answer in self._answers(key)]

    def has_left(self, rank: int) -> bool:
        """Return True if the rank has left."""
        return rank in self._left

    def stuck(self) -> list[Answer]:
        """Refuse all operations if every rank waits and no wait can end; return nothing while any rank works."""
        if not self._waiting or len(self._waiting) + len(self._joined) + len(self._left) < self._size:
            return []
        waits = [f"rank {rank} waits for {self._described(key)}" for rank, key in sorted(self._waiting.items())]
        waits += [f"rank {rank} has joined" for rank in sorted(self._joined)]
        text = (
            f"{', '.join(waits)}: none of these can begin, because the other ranks have not submitted it. All ranks must "
            "submit the same operations under the same names; unnamed ones are matched by their order."
        )
        return [self._refuse(key, text) for key in list(self._entries)]

    def stalled(self, now: float) -> list[str]:
        """Descriptions of operations that have waited for other ranks for a minute; each is returned once."""
        descriptions = []
        for key, entry in self._entries.items():
            if now - entry.since > WARN_AFTER_S and not entry.warned:
                entry.warned = True
                missing = [rank for rank in self._sets[key[0]] if rank not in entry.submitted]
                descriptions.append(f"{self._described(key)} waits for rank(s) {', '.join(map(str, missing))}")
        return descriptions

    def _answers(self, key: Key) -> list[Answer]:
        """The answers for one operation, if it can start or must be refused."""
        entry, members = self._entries[key], self._sets[key[0]]
        missing = [rank for rank in members if rank not in entry.submitted]

        # The operation waits until each missing rank has joined, and can't be completed if one has left.
        for rank in missing:
            if rank in self._left:
                return [self._refuse(key, f"{self._described(key)}: rank {rank} {self._left[rank]}.", mistake=False)]
        if any(rank not in self._joined for rank in missing):
            return []

        signatures = {rank: entry.submitted[rank][0] for rank in members if rank in entry.submitted}
        text = disagreement(key[1], signatures)
        signature = next(iter(signatures.values()))
        if not text and missing and not (signature.kind == "barrier" or signature.op in SUMS):
            operation = signature.op or signature.kind
            text = f"{self._described(key)}: {operation} is not supported while rank {missing[0]} has joined."
        if text:
            return [self._refuse(key, text)]

        self._forget(key)
        numbers = tuple(entry.submitted[rank][1] for rank in members if rank in entry.submitted)
        return [Run(key[0], (key[1],), (signature,), numbers, members, tuple(missing))]

    def _refuse(self, key: Key, text: str, mistake: bool = True) -> Refuse:
        ranks = tuple(self._entries[key].submitted)
        self._forget(key)
        return Refuse(key[0], key[1], text, ranks, mistake)

    def _forget(self, key: Key) -> None:
        del self._entries[key]
        self._waiting = {rank: waited for rank, waited in self._waiting.items() if waited != key}

    def _described(self, key: Key) -> str:
        signature = next(iter(self._entries[key].submitted.values()))[0]
        return f'{signature.kind} "{key[1]}"' + (f" ({signature.parts})" if signature.parts else "")


def disagreement(name: str, signatures: dict[int, Signature]) -> str:
    """Describe how the ranks' signatures of an operation differ; empty if they agree.

    >>> have = Signature("allreduce", ("float32",), ((2, 3),), (4,), op="average")
    >>> disagreement("loss", {0: have, 1: have})
    ''
    >>> disagreement("loss", {0: have, 1: replace(have, shapes=((2, 4),))})
    'allreduce "loss": rank 0 has the shape (2, 3), rank 1 (2, 4). All ranks must give the same.'
    """
    (first, signature), *others = signatures.items()
    for rank, other in others:
        if other == signature:
            continue
        for label, mine, theirs in _compared(signature, other):
            if mine != theirs:
                return (
                    f'{signature.kind} "{name}": rank {first} has the {label} {mine}, rank {rank} {theirs}. '
                    "All ranks must give the same."
                )
    return ""


def _compared(first: Signature, second: Signature) -> Iterable[tuple[str, Any, Any]]:
    yield "operation", first.kind, second.kind
    yield "number of tensors", len(first.shapes), len(second.shapes)
    names = first.parts.split(", ") if first.parts.count(", ") == len(first.shapes) - 1 else [""] * len(first.shapes)
    for part, mine, theirs in zip(names, first.shapes, second.shapes, strict=True):
        yield f"shape of {part}" if part else "shape", mine, theirs
    for part, mine, theirs in zip(names, first.dtypes, second.dtypes, strict=True):
        yield f"type of {part}" if part else "type", mine, theirs
    yield "tensors", first.parts, second.parts
    for label in ("device", "op", "root", "prescale", "postscale"):
        yield {"root": "root rank", "op": "reduction"}.get(label, label), getattr(first, label), getattr(second, label)


def fuse(answers: Iterable[Answer]) -> list[Answer]:
    """Fuse neighbouring sums of one kind, up to `FUSION_BYTES`. Other answers, and small sums, stay as they are.

    Which operations are neighbours depends on the moment when ranks submit them. A sum of floating-point numbers over three
    or more ranks is added up in an order that depends on its position in the fused tensor. So such sums are never fused:
    the same program gives the same bits in every run.
    """
    fused: list[Answer] = []
    nbytes = 0
    for answer in answers:
        last = fused[-1] if fused else None
        if isinstance(answer, Run) and isinstance(last, Run) and _can_fuse(last, answer):
            nbytes += answer.signatures[0].nbytes
            if nbytes <= FUSION_BYTES:
                names, signatures = last.names + answer.names, last.signatures + answer.signatures
                fused[-1] = replace(last, names=names, signatures=signatures)
                continue
        nbytes = answer.signatures[0].nbytes if isinstance(answer, Run) else 0
        fused.append(answer)
    return fused


def _can_fuse(first: Run, second: Run) -> bool:
    a, b = first.signatures[0], second.signatures[0]
    if a.kind != "allreduce" or b.kind != "allreduce" or a.op == "adasum" or first.joined != second.joined:
        return False
    if a.small or b.small or not _order_is_free(first):
        return False
    if len({*a.dtypes, *b.dtypes}) != 1:
        return False
    same = ("op", "device", "prescale", "postscale", "process_set")
    return all(getattr(a, name) == getattr(b, name) for name in same)


def _order_is_free(run: Run) -> bool:
    """Return True if a reduction has the same bits in every order of the ranks' values."""
    signature = run.signatures[0]
    return len(run.members) < 3 or signature.op in ("min", "max") or "int" in signature.dtypes[0]
