"""What is read from a compiled program's text: its collectives, and what libraries will set aside while they work.

XLA writes an operation as `%name = TYPE operation(operands), …`, where TYPE is `f32[64,3]{1,0}` or a tuple of such. One
that runs beside others is in two halves, `all-reduce-start` and `all-reduce-done`; the first half counts. Operations that
belong together are in a computation, from `%name (…) -> TYPE {` to `}`; a fusion names the one that it runs.

On a CPU, products of matrices are left to the library YNNPACK, often in a fusion with what comes before and after them.
What lies in memory within such a fusion is not in XLA's account.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_CALL = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"(?:ENTRY )?%([\w.-]+) \(.*\) -> .* \{")
_OPERATION = re.compile(r"\s*(ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)")
_LIBRARY = re.compile(r"calls=%([\w.-]+),.*\"__ynn_fusion\"")


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a program.

    Attributes:
        kind: one of `KINDS`.
        count: how many there are.
        nbytes: of their results on one device, together.
    """

    kind: str
    count: int
    nbytes: int


def collectives(text: str) -> list[Collective]:
    """The collectives of a program, by kind.

    Args:
        text: the compiled program's, as `compiled.as_text()` gives it.
    """
    found: dict[str, list[int]] = {}
    for line in text.splitlines():
        call = _CALL.search(line)
        if call is not None:
            result, kind, start = call.groups()
            found.setdefault(kind, []).append(_exchanged(result, kind, bool(start)))
    return [Collective(kind, len(found[kind]), sum(found[kind])) for kind in KINDS if kind in found]


def set_aside(text: str) -> int:
    """The most bytes that a CPU's libraries take for themselves at once, beside what XLA's account has.

    Rules by measurement (`benchmarks/plan_accuracy.py`), of jaxlib 0.10.2. A convolution takes as much as its result. In a
    fusion, products lie in memory as a whole, and so does what is reduced and then needed again, as in a softmax; one of
    them lies where the fusion's result will.

    Args:
        text: the compiled program's.
    """
    fusions = set(_LIBRARY.findall(text))
    most = 0
    for name, operations in _computations(text):
        convolutions = [_nbytes(one.result) for one in operations if one.kind == "convolution"]
        most = max(most, *convolutions, _held_inside(operations) if name in fusions else 0, 0)
    return most


def wire_bytes(found: Iterable[Collective], devices: int) -> float:
    """What each device must at least send: for an all-reduce of S bytes over n devices 2 (n-1)/n S, a ring's share."""
    if devices < 2:
        return 0.0
    part = (devices - 1) / devices
    shares = {"all-reduce": 2 * part, "all-gather": part, "reduce-scatter": devices - 1, "all-to-all": part}
    return sum(shares.get(one.kind, 1.0) * one.nbytes for one in found)


@dataclass(frozen=True)
class _Operation:
    """`ROOT %name = result kind(%operands…)`."""

    root: bool
    name: str
    result: str
    kind: str
    operands: tuple[str, ...]


def _computations(text: str) -> Iterator[tuple[str, list[_Operation]]]:
    name, operations = "", []
    for line in text.splitlines():
        begins = _COMPUTATION.match(line)
        if begins is not None:
            name, operations = begins[1], []
        elif line.startswith("}"):
            yield name, operations
        elif found := _OPERATION.match(line):
            root, own, result, kind, operands = found.groups()
            operations.append(_Operation(bool(root), own, result, kind, tuple(re.findall(r"%([\w.-]+)", operands))))


def _held_inside(operations: list[_Operation]) -> int:
    """The bytes of what lies in memory as a whole within a fusion, but for what lies where the result will."""
    held, result = [], 0
    for one in operations:
        users = [other.kind for other in operations if one.name in other.operands]
        if one.root:
            result = _nbytes(one.result)
        elif one.kind == "dot" or (one.kind != "parameter" and "reduce" in users and len(users) > 1):
            held.append(_nbytes(one.result))
    return sum(held) - max((one for one in held if one <= result), default=0)


def _exchanged(result: str, kind: str, start: bool) -> int:
    """The bytes of a collective's result; the first half of those in halves names what went in, too.

    The one of a permutation names two numbers without dimensions besides: `(f32[64], f32[64], u32[], u32[])`.
    """
    sizes = _sizes(result.replace("u32[]", "") if start and kind == "collective-permute" else result)
    if start and kind in ("all-gather", "collective-permute", "reduce-scatter"):
        sizes = sizes[len(sizes) // 2 :]
    return sum(sizes)


def _nbytes(result: str) -> int:
    return sum(_sizes(result))


def _sizes(result: str) -> list[int]:
    return [_size(*match.groups()) for match in _ARRAY.finditer(result)]


def _size(kind: str, bits: str | None, dimensions: str) -> int:
    elements = 1
    for dimension in filter(None, dimensions.split(",")):
        elements *= int(dimension)
    return elements * (1 if kind == "pred" else max(1, int(bits or 8) // 8))
