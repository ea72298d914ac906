"""Compiled programs in a file of JAX's profiler: their operations, and when their memory is taken and given back.

An XPlane file holds each program that ran as a message of XLA's protocol buffers (`hlo.proto`). No package of JAX reads
these, so this file reads the few fields that the tables need. The numbers below are those of XLA's messages:

    XSpace        1 planes
    XPlane        2 name, 4 event_metadata, 5 stat_metadata (maps: 1 key, 2 value)
    HloProto      1 hlo_module, 3 buffer_assignment
    HloModule     1 name, 3 computations, 5 id
    Computation   1 name, 2 instructions, 5 id
    Instruction   1 name, 2 opcode, 3 shape, 7 metadata (2 op_name), 35 id, 38 called_computation_ids
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_METADATA = b"/host:metadata"
_HLO = b"Hlo Proto"


@dataclass(frozen=True)
class Instruction:
    """An operation of a program.

    Attributes:
        name: its name, which is unique in the program.
        opcode: its kind, such as "fusion".
        scope: the names that the lowering gave it, such as "jit(step)/aten.mm.default:mm_1/dot_general".
        elements: the number of elements of its result.
        called: the ids of the computations that it runs.
    """

    name: str
    opcode: str
    scope: str
    elements: int
    called: tuple[int, ...]


@dataclass(frozen=True)
class BufferEvent:
    """Memory that an instruction takes (`nbytes` > 0), or its memory that is given back (`nbytes` < 0)."""

    instruction: str
    nbytes: int


@dataclass(frozen=True)
class HloProgram:
    """A compiled program.

    Attributes:
        id: the number by which events name it.
        name: its name, such as "jit_step".
        computations: the instructions of each computation, by id.
        held_bytes: memory that is in use while the program runs: its inputs, its outputs and its constants.
        reserved_bytes: all memory of a run.
        events: memory for values in between, in the order in which XLA has planned it. None if the program lacks the
            plan, since it comes from the cache of compiled programs.
    """

    id: int
    name: str
    computations: dict[int, tuple[Instruction, ...]]
    held_bytes: int
    reserved_bytes: int
    events: tuple[BufferEvent, ...] | None

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """All instructions by name."""
        return {each.name: each for instructions in self.computations.values() for each in instructions}


Value = int | memoryview


def fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    """Yield the number and the value of each field of a message: a number, or bytes.

    Raises:
        ValueError: not a message.
    """
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        match key & 7:
            case 0:
                value, at = _varint(message, at)
                yield key >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, at = _varint(message, at)
            case 5:
                size = 4
            case kind:
                raise ValueError(f"a field of kind {kind} in a message of XLA")
        if at + size > end:
            raise ValueError("a message of XLA that ends too early")
        yield key >> 3, message[at : at + size]
        at += size


def read_programs(path: Path) -> list[HloProgram]:
    """Read the programs of an XPlane file.

    Raises:
        ValueError: the file isn't one.
    """
    programs = []
    for number, plane in fields(memoryview(path.read_bytes())):
        if number == 1 and _name_of_plane(plane) == _METADATA:
            programs += [_program(message) for message in _hlo_messages(plane)]
    return programs


def _name_of_plane(plane: Value) -> bytes:
    return next((bytes(value) for number, value in fields(_message(plane)) if number == 2), b"")


def _hlo_messages(plane: Value) -> Iterator[memoryview]:
    """The programs are statistics of the events that a plane knows."""
    known = _by_number(_message(plane))
    names = (_by_number(_message(_by_number(_message(entry))[2][0])) for entry in known[5])
    hlo = {metadata[1][0] for metadata in names if metadata[2] and bytes(_message(metadata[2][0])) == _HLO}
    for entry in known[4]:
        for stat in _by_number(_message(_by_number(_message(entry))[2][0]))[5]:
            parts = _by_number(_message(stat))
            if parts[1] and parts[1][0] in hlo and parts[6]:
                yield _message(parts[6][0])


def _program(message: memoryview) -> HloProgram:
    parts = _by_number(message)
    module = _by_number(_message(parts[1][0]))
    computations = {}
    for computation in module[3]:
        by_number = _by_number(_message(computation))
        computations[_number(by_number[5])] = tuple(_instruction(_message(each)) for each in by_number[2])
    held, reserved, events = _memory(_message(parts[3][0])) if parts[3] else (0, 0, ())
    return HloProgram(_number(module[5]), _text(module[1]), computations, held, reserved, events)


def _instruction(message: memoryview) -> Instruction:
    parts = _by_number(message)
    metadata = _by_number(_message(parts[7][0])) if parts[7] else {2: []}
    return Instruction(
        _text(parts[1]),
        _text(parts[2]),
        _text(metadata[2]),
        _elements(_message(parts[3][0])) if parts[3] else 0,
        tuple(_packed(parts[38])),
    )


def _elements(shape: memoryview) -> int:
    """The elements of a shape: 3 dimensions, 4 the shapes of a tuple."""
    parts = _by_number(shape)
    if parts[4]:
        return sum(_elements(_message(each)) for each in parts[4])
    return math.prod(_packed(parts[3]))


def _memory(assignment: memoryview) -> tuple[int, int, tuple[BufferEvent, ...] | None]:
    """Read XLA's plan for the memory of a program: what is held, what is reserved, and the events.

    BufferAssignment  1 logical_buffers (1 id, 2 size), 3 buffer_allocations, 4 heap_simulator_traces
    BufferAllocation  2 size, 3 is_thread_local, 5 is_entry_computation_parameter, 7 maybe_live_out, 12 is_constant
    HeapSimulatorTrace  1 events (1 kind, 2 buffer_id, 4 instruction_name)

    The kinds of events are 0: take memory, 1: give it back, and 2: take over the memory of another buffer, which is given
    back just before.
    """
    parts = _by_number(assignment)
    sizes = {}
    for buffer in parts[1]:
        by_number = _by_number(_message(buffer))
        sizes[_number(by_number[1])] = _number(by_number[2])
    held = reserved = 0
    for allocation in parts[3]:
        by_number = _by_number(_message(allocation))
        if not _number(by_number[3]):
            reserved += _number(by_number[2])
            held += _number(by_number[2]) if any(_number(by_number[flag]) for flag in (5, 7, 12)) else 0
    events = []
    for trace in parts[4]:
        for event in _by_number(_message(trace))[1]:
            by_number = _by_number(_message(event))
            kind, nbytes = _number(by_number[1]), sizes.get(_number(by_number[2]), 0)
            if nbytes:
                events.append(BufferEvent(_text(by_number[4]), -nbytes if kind == 1 else nbytes))
    planned = parts[4] or held == reserved
    return held, reserved, tuple(events) if planned else None


def _by_number(message: memoryview) -> defaultdict[int, list[Value]]:
    by_number: defaultdict[int, list[Value]] = defaultdict(list)
    for number, value in fields(message):
        by_number[number].append(value)
    return by_number


def _message(value: Value) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number in place of a message of XLA")
    return value


def _number(values: list[Value]) -> int:
    """The number of a field that occurs once. A field that is absent has 0."""
    value = values[-1] if values else 0
    return value if isinstance(value, int) else 0


def _text(values: list[Value]) -> str:
    return bytes(_message(values[-1])).decode(errors="replace") if values else ""


def _packed(values: list[Value]) -> Iterator[int]:
    """The numbers of a repeated field, which may be written as one field or as many."""
    for value in values:
        if isinstance(value, int):
            yield value
            continue
        at = 0
        while at < len(value):
            number, at = _varint(value, at)
            yield number


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and the place after it."""
    value = shift = 0
    while True:
        if at >= len(message):
            raise ValueError("a message of XLA that ends too early")
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
