"""Which operation may run when: ranks announce operations by name, in any order, and all of them run in one order.

A collective works only if all ranks call it together. The order in which gradients become ready, or in which a program
submits tensors, may differ from rank to rank; and a mistake (another name, another shape) would let everybody wait for
ever. So rank 0 keeps this table. Each rank says "I have `name`, and this is its signature"; when the last one has said so:

    signatures agree    →  Run       all start it, next in the one order that everybody follows
    they don't          →  Refuse    all get an error which says who has what
                           small ones run at once: their values came with the words, and go back with the answer
    a rank has joined   →  it counts as there, and takes part in sums with zeros
    a rank has left     →  Refuse    as nobody can wait for it any more
    all ranks wait, each for something else  →  Refuse  (`stuck`)

This module is the table alone, without sockets or threads: each method returns the answers that follow from what was said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

FUSION_BYTES = 128 * 2**20  # Horovod's default: sums that are ready together travel together, up to this size
SMALL_BYTES = 16 * 2**10  # up to this size, tensors to be reduced travel with the words about them
WARN_AFTER_S = 60.0

GLOBAL = 0  # the process set of all ranks
SUMS = ("average", "sum")  # what a rank that has joined can take part in with zeros
EXTREMES = ("min", "max", "product")

Key = tuple[int, str]  # process set, name


@dataclass(frozen=True)
class Signature:
    """What all ranks must agree on in an operation.

    Attributes:
        kind: allreduce, allgather, broadcast, alltoall, reducescatter or barrier.
        dtypes: of each tensor, such as "float32".
        shapes: of each tensor; without the first dimension where that may differ (allgather, alltoall).
        itemsizes: bytes of an element of each tensor.
        device: "cpu" or "cuda".
        op: average, sum, adasum, min, max or product, where something is reduced.
        root: the rank that has the value, where something is broadcast.
        prescale: what tensors are multiplied by before a reduction.
        postscale: and after.
        process_set: the number of a set of ranks.
        parts: what the tensors are, for messages; empty where the name says it.
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
        """Of all tensors, without what a shape leaves out."""
        return sum(math.prod(shape) * itemsize for shape, itemsize in zip(self.shapes, self.itemsizes, strict=True))

    @property
    def small(self) -> bool:
        """Whether the tensors travel with the words: a transfer of their own would take longer than they do."""
        reduced = self.kind == "allreduce" and self.op in SUMS + EXTREMES and self.device == "cpu"
        return reduced and 0 < self.nbytes <= SMALL_BYTES

    def to_json(self) -> list[Any]:
        return [getattr(self, name) for name in self.__dataclass_fields__]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Signature:
        given = dict(zip(cls.__dataclass_fields__, values, strict=True))
        for name in ("dtypes", "itemsizes"):
            given[name] = tuple(given[name])
        return cls(**{**given, "shapes": tuple(tuple(shape) for shape in given["shapes"])})


@dataclass(frozen=True)
class Run:
    """Start these operations, fused into one; all members of the process set do, the `joined` ones with zeros.

    Attributes:
        process_set: whose.
        names: of the operations.
        signatures: one for each name.
        numbers: of each member of the set, in order, what it told beside the (single) name: rows, or splits.
        members: the ranks of the process set.
        joined: those of them who have joined.
        data: of a small operation, what all ranks' tensors were reduced to.
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
    """Whoever has submitted this gets an error. `mistake`: the program's own; otherwise a rank is missing."""

    process_set: int
    name: str
    text: str
    ranks: tuple[int, ...]
    mistake: bool = True


@dataclass(frozen=True)
class Joined:
    """All ranks have joined, `last` as the last one."""

    last: int


Answer = Run | Refuse | Joined


@dataclass
class _Entry:
    """An operation that some ranks have submitted. `told`: rank → signature and numbers."""

    since: float
    told: dict[int, tuple[Signature, tuple[int, ...]]] = field(default_factory=dict)
    warned: bool = False


class Negotiation:
    """See the module's docstring. `size`: how many ranks there are."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._sets: dict[int, tuple[int, ...]] = {GLOBAL: tuple(range(size))}
        self._entries: dict[Key, _Entry] = {}
        self._joined: list[int] = []
        self._left: dict[int, str] = {}
        self._waiting: dict[int, Key] = {}
        self.heard = 0  # how much has been said; while this stands still, nothing changes

    def add_set(self, number: int, members: Sequence[int]) -> None:
        """A process set, before anybody submits something for it."""
        self._sets[number] = tuple(members)

    def submit(self, rank: int, name: str, signature: Signature, numbers: Sequence[int], now: float) -> list[Answer]:
        """A rank has an operation ready."""
        self.heard += 1
        key = (signature.process_set, name)
        entry = self._entries.setdefault(key, _Entry(now))
        entry.told[rank] = (signature, tuple(numbers))
        return self._look(key)

    def join(self, rank: int) -> list[Answer]:
        """A rank has no more data; it takes part in sums with zeros until all have joined."""
        self.heard += 1
        self._joined.append(rank)
        answers = [answer for key in list(self._entries) for answer in self._look(key)]
        if len(self._joined) == self._size:
            answers.append(Joined(rank))
            self._joined = []
        return answers

    def wait(self, rank: int, key: Key) -> None:
        """A rank does nothing but wait for this operation."""
        if key in self._entries and self._waiting.get(rank) != key:
            self.heard += 1
            self._waiting[rank] = key

    def leave(self, rank: int, why: str) -> list[Answer]:
        """A rank takes part no more; `why` is read after "rank 1"."""
        self.heard += 1
        self._left[rank] = why
        return [answer for key in list(self._entries) for answer in self._look(key)]

    def has_left(self, rank: int) -> bool:
        """Whether `leave` was called for it."""
        return rank in self._left

    def stuck(self) -> list[Answer]:
        """What to refuse because all ranks wait and no wait can end; nothing while any rank is at work."""
        if not self._waiting or len(self._waiting) + len(self._joined) + len(self._left) < self._size:
            return []
        waits = [f"rank {rank} waits for {self._described(key)}" for rank, key in sorted(self._waiting.items())]
        waits += [f"rank {rank} has joined" for rank in sorted(self._joined)]
        text = (
            f"{', '.join(waits)}: none of these can begin, since the other ranks have not submitted it. All ranks must "
            "submit the same operations under the same names; unnamed ones are matched by their order."
        )
        return [self._refuse(key, text) for key in list(self._entries)]

    def stalled(self, now: float) -> list[str]:
        """Operations that some ranks have been waiting with for a minute, in words; each is told once."""
        found = []
        for key, entry in self._entries.items():
            if now - entry.since > WARN_AFTER_S and not entry.warned:
                entry.warned = True
                missing = [rank for rank in self._sets[key[0]] if rank not in entry.told]
                found.append(f"{self._described(key)} waits for rank(s) {', '.join(map(str, missing))}")
        return found

    def _look(self, key: Key) -> list[Answer]:
        """What follows for one operation."""
        entry, members = self._entries[key], self._sets[key[0]]
        missing = [rank for rank in members if rank not in entry.told]
        for rank in missing:
            if rank in self._left:
                return [self._refuse(key, f"{self._described(key)}: rank {rank} {self._left[rank]}.", mistake=False)]
        if any(rank not in self._joined for rank in missing):
            return []
        signatures = {rank: entry.told[rank][0] for rank in members if rank in entry.told}
        text = disagreement(key[1], signatures)
        signature = next(iter(signatures.values()))
        if not text and missing and not (signature.kind == "barrier" or signature.op in SUMS):
            what = signature.op or signature.kind
            text = f"{self._described(key)}: {what} is not supported while rank {missing[0]} has joined."
        if text:
            return [self._refuse(key, text)]
        self._forget(key)
        numbers = tuple(entry.told[rank][1] for rank in members if rank in entry.told)
        return [Run(key[0], (key[1],), (signature,), numbers, members, tuple(missing))]

    def _refuse(self, key: Key, text: str, mistake: bool = True) -> Refuse:
        ranks = tuple(self._entries[key].told)
        self._forget(key)
        return Refuse(key[0], key[1], text, ranks, mistake)

    def _forget(self, key: Key) -> None:
        del self._entries[key]
        self._waiting = {rank: waited for rank, waited in self._waiting.items() if waited != key}

    def _described(self, key: Key) -> str:
        signature = next(iter(self._entries[key].told.values()))[0]
        return f'{signature.kind} "{key[1]}"' + (f" ({signature.parts})" if signature.parts else "")


def disagreement(name: str, signatures: dict[int, Signature]) -> str:
    """What the ranks don't agree on in an operation, as a sentence; empty if they do.

    >>> have = Signature("allreduce", ("float32",), ((2, 3),), (4,), op="average")
    >>> disagreement("loss", {0: have, 1: have})
    ''
    >>> disagreement("loss", {0: have, 1: replace(have, shapes=((2, 4),))})
    'allreduce "loss": rank 0 has the shape (2, 3), rank 1 (2, 4). All ranks must give the same.'
    """
    (first, one), *others = signatures.items()
    for rank, other in others:
        if other == one:
            continue
        for label, mine, theirs in _compared(one, other):
            if mine != theirs:
                return (
                    f'{one.kind} "{name}": rank {first} has the {label} {mine}, rank {rank} {theirs}. '
                    "All ranks must give the same."
                )
    return ""


def _compared(one: Signature, other: Signature) -> Iterable[tuple[str, Any, Any]]:
    yield "operation", one.kind, other.kind
    yield "number of tensors", len(one.shapes), len(other.shapes)
    names = one.parts.split(", ") if one.parts.count(", ") == len(one.shapes) - 1 else [""] * len(one.shapes)
    for part, mine, theirs in zip(names, one.shapes, other.shapes, strict=True):
        yield f"shape of {part}" if part else "shape", mine, theirs
    for part, mine, theirs in zip(names, one.dtypes, other.dtypes, strict=True):
        yield f"type of {part}" if part else "type", mine, theirs
    yield "tensors", one.parts, other.parts
    for label in ("device", "op", "root", "prescale", "postscale"):
        yield {"root": "root rank", "op": "reduction"}.get(label, label), getattr(one, label), getattr(other, label)


def fuse(answers: Iterable[Answer]) -> list[Answer]:
    """Neighbouring sums of one kind as one, up to `FUSION_BYTES`; all else, small ones too, as it was, in its order.

    Which operations are neighbours depends on the moment when ranks submit them. A sum of floating-point numbers over
    three or more ranks is added up in an order that depends on its place among what it travels with. So such sums travel
    alone: the same program gives the same bits in every run.
    """
    fused: list[Answer] = []
    nbytes = 0
    for answer in answers:
        last = fused[-1] if fused else None
        if isinstance(answer, Run) and isinstance(last, Run) and _alike(last, answer):
            nbytes += answer.signatures[0].nbytes
            if nbytes <= FUSION_BYTES:
                names, signatures = last.names + answer.names, last.signatures + answer.signatures
                fused[-1] = replace(last, names=names, signatures=signatures)
                continue
        nbytes = answer.signatures[0].nbytes if isinstance(answer, Run) else 0
        fused.append(answer)
    return fused


def _alike(one: Run, other: Run) -> bool:
    a, b = one.signatures[0], other.signatures[0]
    if a.kind != "allreduce" or b.kind != "allreduce" or a.op == "adasum" or one.joined != other.joined:
        return False
    if a.small or b.small or not _order_is_free(one):
        return False
    if len({*a.dtypes, *b.dtypes}) != 1:
        return False
    same = ("op", "device", "prescale", "postscale", "process_set")
    return all(getattr(a, name) == getattr(b, name) for name in same)


def _order_is_free(run: Run) -> bool:
    """Whether a reduction has the same bits in whichever order its ranks' values are put together."""
    signature = run.signatures[0]
    return len(run.members) < 3 or signature.op in ("min", "max") or "int" in signature.dtypes[0]
