"""The memory of one rank of a sharded training, from the lifetimes of a captured step.

The step is captured with whole parameters, of the type in which they are gathered. FSDP2 then changes the lifetimes:

    state        parameters and the optimizer's state: the rank's part, in the type of the master weights
    gather       a unit's weights are gathered into a buffer, and copied out of it. The buffer stays until the next unit is
                 there. In the backward pass the next unit is gathered while a unit is computed.
    weights      from the unit's first use to its last one in a pass; with `reshards=False`, to the end of its backward pass
    gradients    whole until the unit's backward pass ends; then in the buffer of a reduce-scatter, until that of the next
                 unit begins; the rank's part stays until the next backward pass
    optimizer    its temporaries: the rank's part

A unit is a repeated block. All other parameters belong to the root, which is gathered from the beginning to the end of
the backward pass.

The result is the memory in each operation, by sections of the step: the forward and the backward pass of each block, what
lies around them, and the optimizer's step. `equal_blocks.py` explains why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from torch.fx import Node

from footplate.planning.layouts import Layout
from footplate.step.xla.capture.captured_step import Captured
from footplate.step.xla.capture.lifetimes import Lifetime, Lifetimes, alive, lifetimes_of, nbytes_of
from footplate.step.xla.capture.needs import parameters_of

# A section of the step: the pass ("forward", "backward"; "between" and the rest for what isn't a block's), and the block.
Section = tuple[str, int]
# The bytes that are alive in each operation of a section.
Sections = Mapping[Section, Sequence[int]]


@dataclass(frozen=True)
class _Unit:
    """The operations of a unit: the first and the last that use its weights, in each pass."""

    begins: int
    ends: int
    backward_begins: int
    backward_ends: int


def memory_of(captured: Captured, blocks: Sequence[Sequence[str]], layout: Layout, widening: float = 1.0) -> Sections:
    """Return the bytes that are alive in each operation, for each section of the step.

    Args:
        captured: the step of one rank. For a sharded layout, its parameters have the type in which they are gathered.
        blocks: the names of the parameters of each repeated block, in their order.
        layout: how devices share the training.
        widening: the bytes of a master weight for each byte of a gathered one: 2 for float32 and bfloat16.
    """
    parameters = parameters_of(captured)
    lifetimes = lifetimes_of(list(captured.graph.graph.nodes), parameters)
    units = [_unit(lifetimes, parameters, set(names)) for names in blocks]
    each = lifetimes.each
    if layout.sharded:
        each = _Sharded(captured, lifetimes, parameters, blocks, units, layout, widening).lifetimes()

    totals = alive(each, lifetimes.operations)
    return {section: totals[first:end] for section, first, end in _sections(lifetimes, units) if first < end}


def _unit(lifetimes: Lifetimes, parameters: Mapping[Node, str], names: set[str]) -> _Unit:
    used: set[int] = set()
    for node, name in parameters.items():
        if name in names:
            used |= lifetimes.users[node]
    ends = [each.first for each in lifetimes.each if each.kind == "gradient" and each.parameter in names]
    used |= {position for position in ends if position >= lifetimes.backward}
    forward = [position for position in used if position < lifetimes.backward]
    backward = [position for position in used if lifetimes.backward <= position < lifetimes.optimizer]
    begins, ends_at = min(forward, default=0), max(forward, default=0)
    return _Unit(begins, ends_at, min(backward, default=lifetimes.backward), max(backward, default=lifetimes.backward))


def _sections(lifetimes: Lifetimes, units: Sequence[_Unit]) -> list[tuple[Section, int, int]]:
    """List the sections: their names, their first operation and the first one after them."""
    sections: list[tuple[Section, int, int]] = []
    position = 0
    bounds = [(("before", 0), unit.begins) for unit in units[:1]]
    bounds += [(("forward", number), unit.begins) for number, unit in enumerate(units[1:])]
    if units:
        bounds.append((("forward", len(units) - 1), units[-1].ends + 1))
        bounds.append((("between", 0), units[-1].backward_begins))
        backward = [*units[-2::-1]]
        bounds += [(("backward", len(units) - 1 - index), unit.backward_begins) for index, unit in enumerate(backward)]
        bounds.append((("backward", 0), units[0].backward_ends + 1))
    bounds += [(("after", 0), lifetimes.optimizer), (("optimizer", 0), lifetimes.operations)]
    for section, end in bounds:
        sections.append((section, position, end))
        position = max(position, end)
    return sections


class _Sharded:
    """Changes the lifetimes of a step into those of a rank."""

    def __init__(
        self,
        captured: Captured,
        lifetimes: Lifetimes,
        parameters: Mapping[Node, str],
        blocks: Sequence[Sequence[str]],
        units: Sequence[_Unit],
        layout: Layout,
        widening: float,
    ) -> None:
        self._lifetimes, self._parameters, self._layout, self._widening = lifetimes, parameters, layout, widening
        self._paths = dict(zip(captured.graph.graph.nodes, captured.paths, strict=False))
        self._unit_of = {name: index for index, names in enumerate(blocks) for name in names}
        self._root = _Unit(0, lifetimes.backward - 1, lifetimes.backward, lifetimes.optimizer - 1)
        self._units = units
        self._last = lifetimes.operations - 1

    def lifetimes(self) -> list[Lifetime]:
        """Return the lifetimes of a rank."""
        changed: list[Lifetime] = []
        for each in self._lifetimes.each:
            if each.kind == "state":
                sharded = self._paths.get(each.node, ("",))[0] in ("params", "optimizer")
                changed.append(replace(each, nbytes=self._part(each.nbytes)) if sharded else each)
            elif each.kind == "gradient":
                # Each gradient has two lifetimes: from its making on, and until the next backward pass.
                changed += self._gradient(each) if each.last == self._last else []
            elif each.first >= self._lifetimes.optimizer:
                changed.append(replace(each, nbytes=self._part(each.nbytes)))
            else:
                changed.append(each)
        for node, name in self._parameters.items():
            changed += self._weights(node, self._unit_of.get(name))
        return changed

    def _part(self, nbytes: int) -> int:
        """The bytes of a rank's part, in the type of the master weights. A scalar stays whole."""
        return nbytes if nbytes <= 8 else ceil(nbytes * self._widening / self._layout.shards)

    def _span(self, unit: int | None) -> _Unit:
        return self._root if unit is None else self._units[unit]

    def _gradient(self, whole: Lifetime) -> list[Lifetime]:
        unit = self._unit_of.get(whole.parameter)
        ends = self._span(unit).backward_ends
        part = self._part(whole.nbytes)
        before = replace(whole, nbytes=part, first=0, last=self._lifetimes.backward - 1)
        after = replace(whole, nbytes=part, first=min(ends + 1, self._last), last=self._last)
        lives = [before, after, replace(whole, last=max(whole.first, ends))]
        if self._layout.shards > 1:
            # The reduce-scatter of the root is the last one.
            until = self._span(unit - 1).backward_ends if unit else self._root.backward_ends
            buffer = replace(whole, nbytes=int(whole.nbytes * self._widening), first=ends, last=max(ends, until))
            lives.append(buffer)
        return lives

    def _weights(self, node: Node, unit: int | None) -> list[Lifetime]:
        if self._layout.shards == 1:
            # Tensor parallelism alone gathers nothing. In a mixed precision, autocast copies the weights.
            return []
        nbytes, span = nbytes_of(node.meta["val"]), self._span(unit)

        def live(first: int, last: int) -> Lifetime:
            return Lifetime(nbytes, first, max(first, last), "value", node)

        if unit is None:
            first_block = self._units[0].begins if self._units else 0
            return [live(0, self._root.backward_ends), live(0, first_block)]
        following = self._units[unit + 1] if unit + 1 < len(self._units) else None
        buffer = live(span.begins, following.begins if following else span.ends)
        if not self._layout.reshards:
            return [buffer, live(span.begins, span.backward_ends)]
        prefetched = following.backward_begins if following else span.backward_begins
        return [
            buffer,
            live(span.begins, span.ends),
            live(prefetched, span.backward_begins),
            live(span.backward_begins, span.backward_ends),
        ]
