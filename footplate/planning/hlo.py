"""The collectives of a compiled program, read from its text.

XLA writes an operation as `%name = TYPE operation(operands), …`, where TYPE is `f32[64,3]{1,0}` or a tuple of such. One
that runs beside others is in two halves, `all-reduce-start` and `all-reduce-done`; the first half counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_CALL = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")


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
            found.setdefault(kind, []).append(_nbytes(result, kind, bool(start)))
    return [Collective(kind, len(found[kind]), sum(found[kind])) for kind in KINDS if kind in found]


def wire_bytes(found: Iterable[Collective], devices: int) -> float:
    """What each device must at least send: for an all-reduce of S bytes over n devices 2 (n-1)/n S, a ring's share."""
    if devices < 2:
        return 0.0
    part = (devices - 1) / devices
    shares = {"all-reduce": 2 * part, "all-gather": part, "reduce-scatter": devices - 1, "all-to-all": part}
    return sum(shares.get(one.kind, 1.0) * one.nbytes for one in found)


def _nbytes(result: str, kind: str, start: bool) -> int:
    sizes = [_size(*match.groups()) for match in _ARRAY.finditer(result)]
    if start and kind in ("all-gather", "collective-permute", "reduce-scatter"):
        sizes = sizes[len(sizes) // 2 :]  # the first half of the tuple is what went in
    return sum(sizes)


def _size(kind: str, bits: str | None, dimensions: str) -> int:
    elements = 1
    for dimension in filter(None, dimensions.split(",")):
        elements *= int(dimension)
    return elements * (1 if kind == "pred" else max(1, int(bits or 8) // 8))
