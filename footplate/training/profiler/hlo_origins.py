"""The user's lines that the operations of a compiled program come from.

The lowering names each operation in the program by its node in the captured graph (`scope_of`). The node knows its line.
XLA keeps these names. It fuses operations, so one instruction may come from several lines.

A program may come from the cache on disk, which ignores the names of operations. If they don't fit to the graph of this
process, another version of Footplate has compiled the program, and its instructions have no lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from footplate.step.xla.capture import Captured
from footplate.step.xla.lowering.interpret import scope_of
from footplate.training.profiler.hlo_proto import HloProgram, Instruction
from footplate.training.profiler.tables import Line

BACKWARD, OPTIMIZER, REST, OF_XLA = "backward", "optimizer step", "rest of the step", "operations of XLA's own"
_SCOPE = re.compile(r"[A-Za-z_][\w.]*\.\w+:\w+")
_PLACE = re.compile(r"(.+?):(\d+): ")


@dataclass(frozen=True)
class Origin:
    """What an operation belongs to.

    Attributes:
        line: the user's line; None if there is none.
        phase: `BACKWARD`, `OPTIMIZER` or `REST`.
    """

    line: Line | None
    phase: str


UNKNOWN = Origin(None, OF_XLA)


def origins_of(captured: Captured) -> dict[str, Origin]:
    """Return the origin of each operation of a captured step, by its scope."""
    origins = {}
    for node in captured.graph.graph.nodes:
        if node.op != "call_function":
            continue
        place = _PLACE.match(node.meta.get("line", ""))
        line = None if place is None else Line(place[1], int(place[2]), "")
        phase = BACKWARD if "backward" in node.meta else OPTIMIZER if "optimizer" in node.meta else REST
        origins[scope_of(node)] = Origin(line, phase)
    return origins


def scope_in(name: str) -> str | None:
    """Return the scope of a node in an instruction's name; None if it has none."""
    scope = _SCOPE.search(name)
    return None if scope is None else scope[0]


class Origins:
    """The origins of a program's instructions.

    Args:
        program: the program.
        steps: the origins of each captured step by scope, by the names of the steps' programs.

    Attributes:
        known: False if the captured step doesn't have the names of the program's operations.
    """

    def __init__(self, program: HloProgram, steps: Mapping[str, Mapping[str, Origin]]) -> None:
        self._program = program
        step = next((step for name, step in steps.items() if program.name.startswith(f"jit_{name}")), None)
        scopes = {scope for each in program.instructions.values() if (scope := scope_in(each.scope)) is not None}
        self.known = scopes <= step.keys() if step is not None else not scopes
        self._of_scope = step if step is not None and self.known else {}
        self._shares: dict[str, dict[Origin, float]] = {}

    def shares(self, instruction: str) -> dict[Origin, float]:
        """Return the origins of an instruction with their shares of its time, which sum to 1.

        An instruction that was fused from several operations is divided in proportion to the elements of their results.
        """
        if instruction not in self._shares:
            self._shares[instruction] = self._shares_of(self._program.instructions.get(instruction))
        return self._shares[instruction]

    def _shares_of(self, instruction: Instruction | None) -> dict[Origin, float]:
        if instruction is None:
            return {UNKNOWN: 1.0}
        elements: Counter[Origin] = Counter()
        for computation in instruction.called if instruction.opcode == "fusion" else ():
            for inner in self._program.computations[computation]:
                origin = self._origin(inner)
                if origin is not UNKNOWN:
                    elements[origin] += max(1, inner.elements)
        total = elements.total()
        return {origin: count / total for origin, count in elements.items()} or {self._origin(instruction): 1.0}

    def _origin(self, instruction: Instruction) -> Origin:
        return self._of_scope.get(scope_in(instruction.scope) or "", UNKNOWN)
