"""Compiled programs in a profile: reading XLA's messages, and dividing an operation among the lines that it comes from."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional import mean_squared_error

import footplate as fp
from footplate.step.xla.capture import capture_training
from footplate.training.profiler.hlo_origins import (
    BACKWARD,
    OPTIMIZER,
    REST,
    Origin,
    Origins,
    origins_of,
    scope_in,
)
from footplate.training.profiler.hlo_proto import (
    BufferEvent,
    HloProgram,
    Instruction,
    fields,
    read_programs,
)
from footplate.training.profiler.hlo_results import HELD, IDLE, HloEvent, HloResults
from footplate.training.profiler.tables import Line

FIRST, SECOND = Line("/train.py", 7, ""), Line("/train.py", 9, "")


def varint(number: int) -> bytes:
    groups = []
    while True:
        number, group = number >> 7, number & 127
        groups.append(group | (128 if number else 0))
        if not number:
            return bytes(groups)


def message(*parts: tuple[int, Any]) -> bytes:
    """A message of protocol buffers, of numbers, texts and other messages."""
    text = b""
    for number, value in parts:
        if isinstance(value, int):
            text += varint(number << 3) + varint(value)
        else:
            value = value.encode() if isinstance(value, str) else value
            text += varint(number << 3 | 2) + varint(len(value)) + value
    return text


def xplane(*hlo: bytes) -> bytes:
    """An XPlane file with programs."""
    stat = message((1, 4), (2, message((1, 4), (2, "Hlo Proto"))))
    events = [(4, message((1, 1), (2, message((1, 1), (5, message((1, 4), (6, program))))))) for program in hlo]
    return message((1, message((2, "/host:CPU"))), (1, message((2, "/host:metadata"), *events, (5, stat))))


def instruction(name: str, opcode: str, scope: str, shape: bytes, *called: int) -> bytes:
    # The ids of computations are packed.
    packed = b"".join(map(varint, called))
    return message((1, name), (2, opcode), (3, shape), (7, message((2, scope))), *([(38, packed)] if called else []))


DOT = (Instruction("dot", "dot", "jit(step)/aten.mm.default:mm/dot_general", 10, ()),)
MATRIX = message((2, 11), (3, varint(4) + varint(8)))


@given(st.lists(st.tuples(st.integers(1, 10_000), st.one_of(st.integers(0, 2**64 - 1), st.binary(max_size=300)))))
def test_the_fields_of_a_message_are_read_back(parts: list[tuple[int, int | bytes]]):
    pairs = [
        (number, value if isinstance(value, int) else bytes(value))
        for number, value in fields(memoryview(message(*parts)))
    ]
    assert pairs == parts


@given(st.binary(min_size=1, max_size=300))
def test_a_message_that_ends_too_early_is_one_clear_error(text: bytes):
    whole = message((1, text))
    with pytest.raises(ValueError, match="a message of XLA that ends too early"):
        list(fields(memoryview(whole[:-1])))


def test_a_program_is_read_with_its_plan_of_memory(tmp_path: Path):
    body = message((5, 3), (2, instruction("sin.0", "sine", "jit(step)/aten.sin.default:sin/sin", MATRIX)))
    tuple_of_two = message((4, MATRIX), (4, MATRIX))
    entry = message((5, 1), (2, instruction("fusion", "fusion", "jit(step)/x", tuple_of_two, 3)))
    module = message((1, "jit_step_4"), (3, body), (3, entry), (5, 42))
    buffers = [(1, message((1, number), (2, size))) for number, size in ((0, 128), (1, 128), (2, 64))]
    allocations = [
        (3, message((1, 0), (2, 1000), (5, 1))),  # an input
        (3, message((1, 1), (2, 500), (7, 1))),  # an output
        (3, message((1, 2), (2, 192))),
        (3, message((1, 3), (2, 7000), (3, 1))),  # of a thread of its own
    ]
    trace = [(0, 0, "sin.0"), (1, 0, "sin.0"), (2, 1, "fusion"), (0, 2, "copy"), (1, 1, "fusion"), (1, 2, "copy")]
    events = message(*((1, message((1, kind), (2, buffer), (4, name))) for kind, buffer, name in trace))
    assignment = message(*buffers, *allocations, (4, events))
    (tmp_path / "p.pb").write_bytes(xplane(message((1, module), (3, assignment))))

    (program,) = read_programs(tmp_path / "p.pb")
    assert (program.id, program.name, program.held_bytes, program.reserved_bytes) == (42, "jit_step_4", 1500, 1692)
    assert program.instructions["sin.0"] == Instruction("sin.0", "sine", "jit(step)/aten.sin.default:sin/sin", 32, ())
    assert (program.instructions["fusion"].elements, program.instructions["fusion"].called) == (64, (3,))
    assert [(event.instruction, event.nbytes) for event in program.events] == [
        ("sin.0", 128), ("sin.0", -128), ("fusion", 128), ("copy", 64), ("fusion", -128), ("copy", -64),
    ]  # fmt: skip


@pytest.mark.parametrize(("temporary", "events"), [(192, None), (0, ())])
def test_a_program_with_temporary_memory_and_no_trace_lacks_its_plan(temporary: int, events: Any, tmp_path: Path):
    """So it comes from the cache of compiled programs."""
    allocations = [(3, message((1, 0), (2, 1000), (5, 1))), (3, message((1, 1), (2, temporary)))]
    module = message((1, "jit_step_4"), (3, message((5, 1))), (5, 42))
    (tmp_path / "p.pb").write_bytes(xplane(message((1, module), (3, message(*allocations)))))
    (program,) = read_programs(tmp_path / "p.pb")
    assert (program.held_bytes, program.reserved_bytes, program.events) == (1000, 1000 + temporary, events)
    ran = HloResults([event("dot", 0, 10)], [replace(program, computations={1: DOT})], {"step": STEP})
    assert ran.has_plans == (events is not None)


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("jit(step)/aten.mm.default:mm_1/dot_general", "aten.mm.default:mm_1"),
        ("jit(run)/while/body/closed_call/aten._softmax.default:_softmax/exp", "aten._softmax.default:_softmax"),
        (
            "jit(step)/transpose(jvp(footplate.attention.default:attention))/mul",
            "footplate.attention.default:attention",
        ),
        ("jit(step)/reduce_sum", None),
        ("", None),
    ],
)
def test_a_name_in_a_program_holds_the_scope_of_a_node(name: str, scope: str | None):
    assert scope_in(name) == scope


class Net(fp.Module):
    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.layer(batch)  # layer
        with torch.no_grad():
            scale = h.abs().amax()  # scale
        loss = mean_squared_error(torch.tanh(h), batch / scale)  # library
        if not self.automatic_optimization:
            self.manual_backward(loss)  # by hand
            self.optimizers().step()  # step by hand
            self.optimizers().zero_grad()
            return None
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def lines_of(by_hand: bool) -> dict[str, set[tuple[str, str]]]:
    """The markers of this file's lines, each with the operations and phases of the captured step."""
    module = Net(by_hand)
    optimizer = module.configure_optimizers()
    captured = capture_training(module, [optimizer] if by_hand else optimizer, torch.ones(2, 4))
    source = Path(__file__).read_text().splitlines()
    by_marker: dict[str, set[tuple[str, str]]] = {}
    for scope, origin in origins_of(captured).items():
        marker = "" if origin.line is None else source[origin.line.number - 1].partition("  # ")[2]
        assert origin.line is None or origin.line.file == __file__
        by_marker.setdefault(marker, set()).add((scope.partition(".")[2].partition(".")[0], origin.phase))
    return by_marker


@pytest.mark.parametrize("by_hand", [False, True])
def test_operations_of_both_passes_know_the_line_that_they_come_from(by_hand: bool):
    """The line is in the user's code also if the operation is a library's. Operations without gradients don't move it."""
    origins = lines_of(by_hand)
    assert {("addmm", REST), ("mm", BACKWARD)} <= origins["layer"]
    assert {("amax", REST)} == {each for each in origins["scale"] if each[0] == "amax"}
    assert all(phase == REST for _, phase in origins["scale"])
    assert {("tanh", REST), ("div", REST)} <= origins["library"]
    assert ("mul", BACKWARD) in origins["library"]
    updates = {(name, phase) for place in origins.values() for name, phase in place if phase == OPTIMIZER}
    assert {name for name, _ in updates} >= {"add"}
    if by_hand:
        assert updates <= origins["step by hand"]


def program(*events: BufferEvent, held: int = 100, name: str = "jit_step_4") -> HloProgram:
    """A product of line 7, a fusion of lines 7 and 9, an optimizer's operation, and a loop."""
    outer = (
        Instruction("dot", "dot", "jit(step)/aten.mm.default:mm/dot_general", 10, ()),
        Instruction("fusion", "fusion", "jit(step)/aten.mul.Tensor:mul/mul", 10, (2,)),
        Instruction("update", "add", "jit(step)/aten.add.Tensor:add/add", 10, ()),
        Instruction("copy", "copy", "", 10, ()),
        Instruction("loop", "while", "jit(step)/while", 10, (1,)),
    )
    inner = (
        Instruction("p", "parameter", "", 1000, ()),
        Instruction("sin", "sine", "jit(step)/aten.sin.default:sin/sin", 30, ()),
        Instruction("mul", "multiply", "jit(step)/aten.mul.Tensor:mul/mul", 10, ()),
    )
    return HloProgram(1, name, {1: outer, 2: inner}, held, 4000, events)


STEP = {
    "aten.mm.default:mm": Origin(FIRST, REST),
    "aten.sin.default:sin": Origin(FIRST, BACKWARD),
    "aten.mul.Tensor:mul": Origin(SECOND, REST),
    "aten.add.Tensor:add": Origin(None, OPTIMIZER),
}


def event(name: str, start_ns: int, duration_ns: int, run: int = 1, device: int = 0) -> HloEvent:
    return HloEvent(1, "jit_step_4", (run, device), name, start_ns, duration_ns)


def test_an_operation_is_divided_among_its_lines_by_elements():
    origins = Origins(program(), {"step": STEP})
    assert origins.known
    assert origins.shares("dot") == {Origin(FIRST, REST): 1.0}
    assert origins.shares("fusion") == {Origin(FIRST, BACKWARD): 0.75, Origin(SECOND, REST): 0.25}
    (unknown,) = origins.shares("copy")
    assert unknown.line is None
    assert origins.shares("of another program") == {unknown: 1.0}


@given(st.dictionaries(st.sampled_from(sorted(STEP)), st.sampled_from([FIRST, SECOND, None])))
def test_shares_sum_to_one_whatever_is_known(lines: dict[str, Line | None]):
    origins = Origins(program(), {"step": {scope: Origin(line, REST) for scope, line in lines.items()}})
    assert origins.known == (lines.keys() == STEP.keys())
    for name in ("dot", "fusion", "update", "copy"):
        assert math.isclose(sum(origins.shares(name).values()), 1.0)


def test_a_program_whose_names_no_captured_step_has_is_named_and_has_no_lines():
    results = HloResults([event("dot", 0, 10)], [program()], {"step": {"aten.mm.default:mm_7": Origin(FIRST, REST)}})
    assert results.unknown == ["jit_step_4"]
    assert results.lines(10) == ([], {"operations of XLA's own": 10, IDLE: 0})


def test_each_program_has_the_lines_of_the_step_with_its_name():
    """The graph of an evaluation may have the same operations as the beginning of a training step."""
    evaluation = {scope: Origin(SECOND, REST) for scope in STEP}
    steps = {"step": STEP, "validation_step": evaluation}
    assert Origins(program(), steps).shares("dot") == {Origin(FIRST, REST): 1.0}
    assert Origins(program(name="jit_validation_step"), steps).shares("dot") == {Origin(SECOND, REST): 1.0}
    other = Origins(program(name="jit_of_the_user"), {"step": STEP})
    assert not other.known


def test_a_program_of_jax_itself_has_no_lines_and_is_no_reason_for_a_note():
    small = HloProgram(1, "jit_add", {1: (Instruction("add", "add", "jit(add)/add", 10, ()),)}, 0, 0, ())
    results = HloResults([HloEvent(1, "jit_add", (1, 0), "add", 0, 10)], [small], {"step": STEP})
    assert results.unknown == []
    assert results.lines(10) == ([], {"operations of XLA's own": 10, IDLE: 0})


@pytest.mark.parametrize("number", [1, 5, 9])
def test_a_program_from_the_cache_is_found_by_its_name_and_its_operations(number: int):
    """Its events have the number that it had in the process which compiled it, perhaps that of another program now."""
    other = HloProgram(5, "jit_add", {1: (Instruction("add", "add", "", 10, ()),)}, 0, 0, ())
    events = [replace(event("dot", 0, 100), program=number), replace(event("fusion", 100, 80), program=number)]
    results = HloResults(events, [other, program()], {"step": STEP})
    lines, _ = results.lines(180)
    assert [(row.line, row.self_ns, row.backward_ns) for row in lines] == [(FIRST, 100, 60), (SECOND, 20, 0)]


def test_events_of_a_program_that_the_file_lacks_belong_to_none():
    results = HloResults([event("dot", 0, 100), event("of another", 0, 100)], [program()], {"step": STEP})
    assert not results.has_programs


def test_times_are_charged_to_lines_and_the_rest_to_phases():
    events = [event("loop", 0, 400), event("dot", 0, 100), event("fusion", 100, 80), event("update", 150, 50)]
    results = HloResults([*events, event("copy", 300, 10)], [program()], {"step": STEP})
    assert [row.name for row in results.operators()] == ["dot", "fusion", "update", "copy"]
    lines, other = results.lines(500)
    assert [(row.line, row.self_ns, row.backward_ns) for row in lines] == [(FIRST, 100, 60), (SECOND, 20, 0)]
    # The fusion and the update overlap.
    assert other == {OPTIMIZER: 50, "operations of XLA's own": 10, IDLE: 290}


def test_memory_of_the_first_device_goes_through_all_runs():
    taken = (BufferEvent("dot", 50), BufferEvent("fusion", 30), BufferEvent("dot", -50), BufferEvent("fusion", -30))
    events = [
        event("dot", 1_000_000, 10), event("fusion", 3_000_000, 10),
        event("dot", 1_500_000, 10, device=1),
        event("dot", 5_000_000, 10, run=2), event("fusion", 4_000_000, 10, run=2),
    ]  # fmt: skip
    results = HloResults(events, [program(*taken)], {"step": STEP})
    rows = results.allocations("tpu", 2)
    assert [(row.step, row.nbytes, row.allocated_bytes, row.operator) for row in rows] == [
        (0, 100, 100, HELD), (0, 50, 150, "dot"), (0, 30, 180, "fusion"), (0, -50, 130, "dot"), (0, -30, 100, "fusion"),
        (1, 50, 150, "dot"), (1, 30, 180, "fusion"), (1, -50, 130, "dot"), (1, -30, 100, "fusion"),
    ]  # fmt: skip
    # Operations may run in another order than they were planned in; the time never goes back.
    assert [row.time_ms for row in rows] == [0.0, 0.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0]
    assert {(row.device, row.reserved_bytes) for row in rows} == {("tpu:0", 4000)}
    assert rows[2].line == FIRST
    assert {row.name: row.self_bytes for row in results.operators()} == {"dot": 150, "fusion": 90}
