"""Parses the text of a compiled program: its collectives, and the memory that libraries allocate while they work.

XLA writes an operation as `%name = TYPE operation(operands), …`, where TYPE is `f32[64,3]{1,0}` or a tuple of such types.
An asynchronous operation has two halves, `all-reduce-start` and `all-reduce-done`; only the first half counts. Operations
are grouped in computations, from `%name (…) -> TYPE {` to `}`; a fusion names the computation that it runs.

On a CPU, the library YNNPACK computes matrix products, often in a fusion with the operations before and after them. XLA's
memory analysis doesn't include the intermediate values of such a fusion.
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
        count: the number of them.
        nbytes: the bytes of all their results on one device.
    """

    kind: str
    count: int
    nbytes: int


def collectives(text: str) -> list[Collective]:
    """Find the collectives of a program, by kind.

    Args:
        text: the text of the compiled program, from `compiled.as_text()`.
    """
    sizes: dict[str, list[int]] = {}
    for line in text.splitlines():
        call = _CALL.search(line)
        if call is not None:
            result, kind, start = call.groups()
            sizes.setdefault(kind, []).append(_exchanged(result, kind, bool(start)))
    return [Collective(kind, len(sizes[kind]), sum(sizes[kind])) for kind in KINDS if kind in sizes]


def library_bytes(text: str) -> int:
    """Estimate the most bytes that a CPU's libraries allocate at once, beside those of XLA's memory analysis.

    The rules come from measurements of jaxlib 0.10.2 (`benchmarks/plan_accuracy.py`). A convolution takes as many bytes as
    its result. In a fusion, products are whole in memory, and so are values that are reduced and then used again, as in a
    softmax; one of them shares the memory of the fusion's result.

    Args:
        text: the text of the compiled program.
    """
    fusions = set(_LIBRARY.findall(text))
    most = 0
    for name, operations in _computations(text):
        convolutions = [_nbytes(operation.result) for operation in operations if operation.kind == "convolution"]
        most = max(most, *convolutions, _held_inside(operations) if name in fusions else 0, 0)
    return most


def wire_bytes(exchanged: Iterable[Collective], devices: int) -> float:
    """The least that each device must send. For an all-reduce of S bytes over n devices this is a ring's 2 (n-1)/n S."""
    if devices < 2:
        return 0.0
    part = (devices - 1) / devices
    shares = {"all-reduce": 2 * part, "all-gather": part, "reduce-scatter": devices - 1, "all-to-all": part}
    return sum(shares.get(collective.kind, 1.0) * collective.nbytes for collective in exchanged)


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
        elif match := _OPERATION.match(line):
            root, own, result, kind, operands = match.groups()
            operations.append(_Operation(bool(root), own, result, kind, tuple(re.findall(r"%([\w.-]+)", operands))))


def _held_inside(operations: list[_Operation]) -> int:
    """The bytes of values that are whole in memory within a fusion, except the one that shares the result's memory."""
    held, result = [], 0
    for operation in operations:
        users = [other.kind for other in operations if operation.name in other.operands]
        if operation.root:
            result = _nbytes(operation.result)
        elif operation.kind == "dot" or (operation.kind != "parameter" and "reduce" in users and len(users) > 1):
            held.append(_nbytes(operation.result))
    return sum(held) - max((nbytes for nbytes in held if nbytes <= result), default=0)


def _exchanged(result: str, kind: str, start: bool) -> int:
    """The bytes of a collective's result.

    The type of a start operation also has the operands, before the results. That of a permutation has two scalars besides:
    `(f32[64], f32[64], u32[], u32[])`.
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
