"""torch's events, summed: by operator, by line of the user's code, by named region, and allocations in time order.

With `with_stack`, the events of a thread are one tree of Python's calls and torch's operators. A call knows the file and
the line that it was made from. So each nanosecond of the training thread is charged once:

    in the user's code, or in a library that the user's code calls    the user's line
    in the backward pass                                              the line of the forward operator with the same
                                                                      sequence number, in a column of its own
    elsewhere                                                         the phase of the step (`regions.py`)

An operator such as `a + b` makes no call. `source_operators.py` finds its line.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch._C import _profiler  # pyright: ignore[reportAttributeAccessIssue]

from footplate.training.profiler import regions
from footplate.training.profiler.source_operators import operator_line
from footplate.training.profiler.tables import Allocation, Line, LineRow, OperatorRow, RegionRow, Results, User

_BACKWARD = "autograd::engine::evaluate_function: "
_LOOP = "/training/loop.py"
_OPERATOR, _ALLOCATION = _profiler._ExtraFields_TorchOp, _profiler._ExtraFields_Allocation
_CALLS = (_profiler._ExtraFields_PyCall, _profiler._ExtraFields_PyCCall)
_REGION = _profiler.RecordScope.USER_SCOPE


class _Visit:
    """An event whose children are being visited.

    Attributes:
        event: the event.
        children: the children that are left.
        start_ns: its beginning. `end_ns` likewise.
        own_ns: its duration less that of its children.
        charge: who gets its own time: a line, the sequence number of a backward operator, or None for the phase.
        in_user: it is a call of a function of the user's. Then `charge` changes from line to line.
        first_line: in such a call: the function's first line.
        cursor_ns: the time up to which everything has been charged, if it is charged by gaps.
        begins_loop: it is a call of a function of the training loop.
        is_region: it is a `record_function` block.
        operator: the innermost operator that contains it, which may be itself.
        name: an operator's name.
        operator_ns: an operator's duration less that of the operators in it.
    """

    __slots__ = (
        "begins_loop", "charge", "children", "cursor_ns", "end_ns", "event", "first_line", "in_user", "is_region", "name",
        "operator", "operator_ns", "own_ns", "start_ns",
    )  # fmt: skip

    def __init__(self, event: Any, charge: Any, operator: _Visit | None) -> None:
        self.event, self.charge, self.operator = event, charge, operator
        self.children: Iterator[Any] = iter(event.children)
        self.start_ns = self.cursor_ns = event.start_time_ns
        self.own_ns = self.operator_ns = event.duration_time_ns
        self.end_ns = self.start_ns + self.own_ns
        self.in_user = self.is_region = self.begins_loop = False
        self.first_line = 0
        self.name = ""

    @property
    def is_charged_by_gaps(self) -> bool:
        """Whether the time between two of its children is charged when the second begins."""
        return self.in_user or self.charge is None


class EventTree:
    """The events of a profile.

    Args:
        roots: torch's events without a parent.
        user: tells the user's files from others.
        device_ns: the time of each operator's kernels on a GPU, by the operator's correlation id.
        last: the step after the last. A loader of unknown length may end when it has begun.
    """

    def __init__(self, roots: Iterable[Any], user: User, device_ns: Mapping[int, float], last: int) -> None:
        self._roots, self._user, self._device_ns, self._last = list(roots), user, device_ns, last
        self._operators: dict[str, OperatorRow] = {}
        self._lines: dict[Line, LineRow] = {}
        # Lines that had called the loop when the recording began.
        self._around: set[Line] = set()
        # The time of a line in each thread.
        self._line_ns: Counter[tuple[Line, int]] = Counter()
        self._regions: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._steps: list[tuple[int, int]] = []
        self._thread = 0
        # Times in each thread that belong to no line: when, and how long.
        self._elsewhere: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        self._forward: dict[int, Line] = {}
        self._backward_ns: Counter[int] = Counter()
        self._backward_device_ns: Counter[int] = Counter()
        self._allocations: list[tuple[Any, int, Any, str]] = []

    def results(self, lines: bool, memory: bool) -> Results:
        """Sum everything.

        Args:
            lines: the events have Python's calls.
            memory: the events have allocations.
        """
        for root in self._roots:
            self._walk(root)
        self._steps.sort()
        for (line, thread), time_ns in self._line_ns.items():
            row = self._line(line)
            if thread == self._thread:
                row.self_ns += time_ns
            else:
                row.beside_ns += time_ns
        unplaced_ns = self._place_backward()
        allocations = self._placed_allocations() if memory else None
        rows = [row for line, row in self._lines.items() if line not in self._around]
        return Results(
            tool="torch.profiler",
            steps_ns=[end - start for start, end in self._steps],
            phases_ns=self._times_of_phases(),
            regions=sorted(map(self._region, self._regions), key=lambda row: -row.total_ns),
            operators=sorted(self._operators.values(), key=lambda row: -(row.self_ns + row.device_ns)),
            lines=sorted(rows, key=lambda row: -row.time_ns) if lines else None,
            other_ns={**self._phases_elsewhere(), "backward, without a line": unplaced_ns} if lines else {},
            allocations=allocations,
        )

    # Regions

    def _region(self, name: str) -> RegionRow:
        intervals = self._regions[name]
        return RegionRow(name, len(intervals), sum(end - start for start, end in intervals))

    def _times_of_phases(self) -> dict[str, int]:
        """The time of each phase of the steps, without the phases in it."""
        total = {name: self._region(name).total_ns for name in regions.NAMES if name in self._regions}
        if regions.TRAIN in total:
            inside = sum(total.get(name, 0) for name in regions.PHASES.values())
            total[regions.TRAIN] = max(0, total[regions.TRAIN] - inside)
        if regions.AFTER in total:
            total[regions.AFTER] = max(0, total[regions.AFTER] - total.get(regions.VALIDATION, 0))
        return total

    def _phases_elsewhere(self) -> dict[str, int]:
        """The time of the training thread that belongs to no line, by phase."""
        at_ns, time_ns = (np.array(numbers, dtype=np.int64) for numbers in self._elsewhere[self._thread])
        if not self._steps or not len(at_ns):
            return {}
        steps = np.array(self._steps, dtype=np.int64)
        step = np.searchsorted(steps[:, 0], at_ns, side="right") - 1
        inside = (step >= 0) & (at_ns < steps[step, 1])
        left = np.where(inside, time_ns, 0)

        # Inner phases come before those around them, and take their time away.
        total: dict[str, int] = {}
        inner_first = [*regions.PHASES.values(), regions.VALIDATION, regions.TRAIN, regions.INPUT, regions.AFTER]
        for name in inner_first:
            intervals = sorted(self._regions.get(name, ()))
            if intervals:
                starts, ends = (np.array(bounds, dtype=np.int64) for bounds in zip(*intervals, strict=True))
                index = np.searchsorted(starts, at_ns, side="right") - 1
                within = (index >= 0) & (at_ns < ends[index])
                total[name] = int(left[within].sum())
                left[within] = 0
        return {**total, "elsewhere": int(left.sum())}

    # The walk

    def _walk(self, root: Any) -> None:
        """Visit the events of a thread, in time order."""
        thread = root.start_tid
        stack: list[_Visit] = []
        event: Any = root
        while True:
            if event is not None:
                fields, parent = event.extra_fields, stack[-1] if stack else None
                if type(fields) is _ALLOCATION:
                    self._allocate(event, fields, parent)
                elif type(fields) is _OPERATOR:
                    stack.append(self._begin_operator(event, fields, parent, thread))
                elif type(fields) in _CALLS:
                    call = self._begin_call(event, fields, parent, thread)
                    if call.begins_loop and not self._around:
                        self._around = {visit.charge for visit in stack if isinstance(visit.charge, Line)}
                    stack.append(call)
                elif parent is None:
                    return
            if not stack:
                return
            event = next(stack[-1].children, None)
            if event is None:
                visit = stack.pop()
                self._end(visit, stack[-1] if stack else None, thread)

    def _begin(self, event: Any, parent: _Visit | None, thread: int) -> _Visit:
        if parent is None:
            return _Visit(event, None, None)
        visit = _Visit(event, parent.charge, parent.operator)
        # In a function of the user's, the time before a call belongs to the line that has run. Time that belongs to a phase
        # is placed where it passed: the loop's own functions last for many steps.
        if parent.is_charged_by_gaps and visit.start_ns > parent.cursor_ns:
            self._charge(parent.charge, visit.start_ns - parent.cursor_ns, parent.cursor_ns, thread)
            parent.cursor_ns = visit.start_ns
        return visit

    def _begin_operator(self, event: Any, fields: Any, parent: _Visit | None, thread: int) -> _Visit:
        visit = self._begin(event, parent, thread)
        name = event.name
        if fields.scope == _REGION:
            # The call that opens the block is its parent, which it outlasts.
            visit.is_region = True
            if name.startswith(regions.STEP):
                self._thread = event.start_tid
                if int(name.removeprefix(regions.STEP)) < self._last:
                    self._steps.append((visit.start_ns, visit.end_ns))
            else:
                self._regions[name].append((visit.start_ns, visit.end_ns))
            return visit

        visit.operator, visit.name = visit, name
        if parent is not None and parent.in_user and isinstance(parent.charge, Line):
            visit.charge = parent.charge = _symbol(parent, name)
        if name.startswith(_BACKWARD):
            visit.charge = fields.sequence_number
        elif isinstance(visit.charge, Line) and (number := fields.sequence_number) >= 0:
            self._forward[number] = visit.charge
        return visit

    def _begin_call(self, event: Any, fields: Any, parent: _Visit | None, thread: int) -> _Visit:
        visit = self._begin(event, parent, thread)
        caller = self._user.line(*_place(fields.caller))
        if caller is not None and parent is not None:
            visit.charge = caller
            if parent.in_user:
                parent.charge = caller
        site = getattr(fields, "callsite", None)
        if site is None:
            return visit

        file, number, function = _place(site)
        if file.endswith(_LOOP) and self._user.is_footplate(file):
            # The call of `trainer.fit` is a line of the user's, too. The training in it isn't charged to that line.
            visit.charge, visit.begins_loop = None, True
            return visit
        own = self._user.line(file, number, function)
        if own is not None:
            visit.in_user, visit.charge, visit.first_line = True, own, own.number
        return visit

    def _end(self, visit: _Visit, parent: _Visit | None, thread: int) -> None:
        if visit.is_region:
            return
        duration = visit.end_ns - visit.start_ns
        if parent is not None:
            parent.own_ns -= duration
            parent.cursor_ns = max(parent.cursor_ns, visit.end_ns)
        own_ns = visit.end_ns - visit.cursor_ns if visit.is_charged_by_gaps else visit.own_ns
        if own_ns > 0:
            self._charge(visit.charge, own_ns, visit.cursor_ns, thread)
        if visit.operator is visit:
            self._end_operator(visit, parent, duration)

    def _end_operator(self, visit: _Visit, parent: _Visit | None, duration: int) -> None:
        outer = None if parent is None else parent.operator
        if outer is not None:
            outer.operator_ns -= duration
        own_ns = max(0, visit.operator_ns)
        row = self._operator(visit.name)
        row.calls += 1
        row.self_ns += own_ns
        row.total_ns += duration
        device_ns = int(self._device_ns.get(visit.event.correlation_id, 0)) if self._device_ns else 0
        row.device_ns += device_ns
        if isinstance(visit.charge, Line):
            line = self._line(visit.charge)
            line.device_ns += device_ns
            line.operators[visit.name] += own_ns + device_ns
        elif visit.charge is not None:
            self._backward_device_ns[visit.charge] += device_ns

    def _charge(self, charge: Any, time_ns: int, at_ns: int, thread: int) -> None:
        if charge is None:
            times, durations = self._elsewhere[thread]
            times.append(at_ns)
            durations.append(time_ns)
        elif isinstance(charge, Line):
            self._line_ns[charge, thread] += time_ns
        else:
            self._backward_ns[charge] += time_ns

    def _line(self, line: Line) -> LineRow:
        row = self._lines.get(line)
        if row is None:
            row = self._lines[line] = LineRow(line)
        return row

    def _operator(self, name: str) -> OperatorRow:
        row = self._operators.get(name)
        if row is None:
            row = self._operators[name] = OperatorRow(name)
        return row

    def _place_backward(self) -> int:
        """Charge the backward operators to the lines of their forward operators. Returns the time without a line."""
        unplaced_ns = 0
        for number, time_ns in self._backward_ns.items():
            line = self._forward.get(number)
            if line is None:
                unplaced_ns += time_ns
            else:
                self._line(line).backward_ns += time_ns
                self._line(line).device_ns += self._backward_device_ns[number]
        return unplaced_ns

    # Memory

    def _allocate(self, event: Any, fields: Any, parent: _Visit | None) -> None:
        operator = None if parent is None else parent.operator
        name = "" if operator is None else operator.name
        self._allocations.append((fields, event.start_time_ns, None if parent is None else parent.charge, name))
        if name:
            self._operator(name).self_bytes += fields.alloc_size

    def _placed_allocations(self) -> list[Allocation]:
        """The allocations in time order, with their steps and lines."""
        starts = [start for start, _ in self._steps]
        begin_ns = starts[0] if starts else 0
        placed = []
        for fields, at_ns, charge, operator in sorted(self._allocations, key=lambda allocation: allocation[1]):
            line = charge if isinstance(charge, Line) else self._forward.get(charge)
            nbytes = fields.alloc_size
            step = max(0, bisect.bisect_right(starts, at_ns) - 1)
            totals = (nbytes, fields.total_allocated, fields.total_reserved)
            placed.append(Allocation((at_ns - begin_ns) / 1e6, step, str(fields.device), *totals, operator, line))
            if line is not None and nbytes > 0:
                self._line(line).allocated_bytes += nbytes
        return placed


def _place(frame: Any) -> tuple[str, int, str]:
    """File, line and function of a frame. All are empty if torch has lost the names.

    torch keeps pointers to the names of code objects. The code of a module is gone after its import.
    """
    try:
        return frame.file_name, frame.line_number, frame.function_name
    except UnicodeDecodeError:
        return "", 0, ""


def _symbol(call: _Visit, operator: str) -> Line:
    """The line of an operator that a function of the user's runs without a call."""
    present = call.charge
    number = operator_line(present.file, call.first_line, present.number, operator)
    return present if number is None else Line(present.file, number, present.function)
