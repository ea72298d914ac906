"""Tables of a profile on XLA: by operation, by the user's line, and the memory over time.

The times are those of the events that JAX's profiler has recorded. The memory is XLA's own plan for each program: when an
operation takes memory for its result, and when it is given back.

On a processor, the events of a program that comes from the cache on disk have the number that it had when it was compiled.
So an event's program is the one that has its name and its operation; see `_numbers`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from footplate.training.profiler.hlo_origins import BACKWARD, Origin, Origins
from footplate.training.profiler.hlo_proto import HloProgram
from footplate.training.profiler.tables import Allocation, Line, LineRow, OperatorRow, RegionRow

# Their time is that of the operations that they run.
_CONTROL = ("while", "conditional", "call")
HELD, IDLE = "inputs and outputs", "no operation runs"


@dataclass(frozen=True)
class HloEvent:
    """An operation that has run.

    Attributes:
        program: the number of the program.
        module: its name.
        run: the run of the program, on one device.
        instruction: the operation.
        start_ns: when it began.
        duration_ns: how long it took.
    """

    program: int
    module: str
    run: tuple[int, int]
    instruction: str
    start_ns: int
    duration_ns: int


class HloResults:
    """The tables.

    Args:
        events: the operations that have run.
        programs: the programs of the profile.
        steps: the origins of the operations of each captured step by scope, by the names of the steps' programs.
    """

    def __init__(
        self, events: Sequence[HloEvent], programs: Iterable[HloProgram], steps: Mapping[str, Mapping[str, Origin]]
    ) -> None:
        self._programs = {program.id: program for program in programs}
        numbers = _numbers(events, self._programs.values())
        events = [replace(each, program=numbers.get((each.module, each.program), -1)) for each in events]
        self._events = sorted((each for each in events if not self._controls(each)), key=lambda each: each.start_ns)
        ran = {each.program for each in self._events} & self._programs.keys()
        self._origins = {number: Origins(self._programs[number], steps) for number in sorted(ran)}

    @property
    def has_programs(self) -> bool:
        """True if the profile holds the programs of its operations."""
        return bool(self._origins)

    @property
    def unknown(self) -> list[str]:
        """The names of the programs whose operations have no lines."""
        return sorted({self._programs[number].name for number, each in self._origins.items() if not each.known})

    @property
    def has_plans(self) -> bool:
        """True if the plan of the memory is known for each program that has run."""
        return all(self._programs[number].events is not None for number in self._origins)

    def operators(self) -> list[OperatorRow]:
        """The operations of the compiled programs, the longest first."""
        rows: dict[str, OperatorRow] = {}
        for event in self._events:
            row = rows.setdefault(event.instruction, OperatorRow(event.instruction))
            row.calls += 1
            row.self_ns += event.duration_ns
            row.total_ns += event.duration_ns
        for number, count in self._runs_of_programs().items():
            for taken in self._programs[number].events or ():
                if taken.nbytes > 0 and taken.instruction in rows:
                    rows[taken.instruction].self_bytes += count * taken.nbytes
        return sorted(rows.values(), key=lambda row: -row.self_ns)

    def programs(self) -> list[RegionRow]:
        """The programs, the longest first, with the number of their runs."""
        rows: dict[str, RegionRow] = {}
        runs: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
        for event in self._events:
            row = rows.setdefault(event.module, RegionRow(event.module))
            runs[event.module].add(event.run)
            row.calls = len(runs[event.module])
            row.total_ns += event.duration_ns
        return sorted(rows.values(), key=lambda row: -row.total_ns)

    def lines(self, wall_ns: int) -> tuple[list[LineRow], dict[str, int]]:
        """The user's lines, the longest first, and the time without a line, by phase.

        Args:
            wall_ns: the time of all recorded steps.
        """
        rows: dict[str, LineRow] = {}
        other: defaultdict[str, float] = defaultdict(float)
        for event in self._events:
            for origin, share in self._shares(event.program, event.instruction).items():
                spent = share * event.duration_ns
                if origin.line is None:
                    other[origin.phase] += spent
                    continue
                row = rows.setdefault(f"{origin.line.file}:{origin.line.number}", LineRow(origin.line))
                if origin.phase == BACKWARD:
                    row.backward_ns += round(spent)
                else:
                    row.self_ns += round(spent)
                row.operators[event.instruction] += round(spent)
        for number, count in self._runs_of_programs().items():
            for taken in self._programs[number].events or ():
                for origin, share in self._shares(number, taken.instruction).items() if taken.nbytes > 0 else ():
                    if origin.line is not None and (row := rows.get(f"{origin.line.file}:{origin.line.number}")):
                        row.allocated_bytes += round(count * share * taken.nbytes)
        times = {phase: round(spent) for phase, spent in other.items()}
        times[IDLE] = max(0, wall_ns - self._busy_ns())
        return sorted(rows.values(), key=lambda row: -row.time_ns), times

    def allocations(self, device: str, steps: int) -> list[Allocation]:
        """Memory of the first device that is taken and given back, in time order.

        Args:
            device: the kind of the device.
            steps: the number of recorded steps.
        """
        first = min((event.run[1] for event in self._events), default=0)
        runs: dict[tuple[int, int], dict[str, int]] = {}
        program_of: dict[tuple[int, int], int] = {}
        for event in self._events:
            if event.run[1] == first and event.program in self._programs:
                program_of.setdefault(event.run, event.program)
                runs.setdefault(event.run, {}).setdefault(event.instruction, event.start_ns)
        began_ns = min((min(starts.values()) for starts in runs.values()), default=0)
        rows: list[Allocation] = []
        held = 0
        for index, (run, starts) in enumerate(runs.items()):
            program, step = self._programs[program_of[run]], index * steps // len(runs)
            now_ns = min(starts.values())
            for instruction, nbytes in _taken(program, held):
                now_ns = max(now_ns, starts.get(instruction, 0))
                before = rows[-1].allocated_bytes if rows else 0
                rows.append(
                    Allocation(
                        (now_ns - began_ns) / 1e6, step, f"{device}:{first}", nbytes, before + nbytes,
                        program.reserved_bytes, instruction, self._line(program.id, instruction),
                    )
                )  # fmt: skip
            held = program.held_bytes
        return rows

    def _controls(self, event: HloEvent) -> bool:
        program = self._programs.get(event.program)
        instruction = None if program is None else program.instructions.get(event.instruction)
        return instruction is not None and instruction.opcode in _CONTROL

    def _shares(self, program: int, instruction: str) -> dict[Origin, float]:
        origins = self._origins.get(program)
        return {} if origins is None else origins.shares(instruction)

    def _line(self, program: int, instruction: str) -> Line | None:
        shares = self._shares(program, instruction)
        return max(shares, key=lambda origin: shares[origin]).line if shares else None

    def _runs_of_programs(self) -> dict[int, int]:
        """How often each program has run, on all devices."""
        runs: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        for event in self._events:
            if event.program in self._programs:
                runs[event.program].add(event.run)
        return {number: len(runs_of_one) for number, runs_of_one in runs.items()}

    def _busy_ns(self) -> int:
        """The time in which at least one operation ran."""
        busy = end = 0
        for event in self._events:
            stop = event.start_ns + event.duration_ns
            busy += max(0, stop - max(end, event.start_ns))
            end = max(end, stop)
        return busy


def _numbers(events: Iterable[HloEvent], programs: Collection[HloProgram]) -> dict[tuple[str, int], int]:
    """The numbers of the programs that the events belong to, by the name and the number in the events.

    Programs of a step with one name are equal, so any of them will do.
    """
    ran: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for event in events:
        ran[event.module, event.program].add(event.instruction)
    numbers = {}
    for (name, number), instructions in ran.items():
        fitting = [each.id for each in programs if each.name == name and instructions <= each.instructions.keys()]
        if fitting:
            numbers[name, number] = number if number in fitting else fitting[0]
    return numbers


def _taken(program: HloProgram, held: int) -> Iterator[tuple[str, int]]:
    """The memory that a run takes and gives back, after a run that has left `held` bytes."""
    if program.held_bytes != held:
        yield HELD, program.held_bytes - held
    left = 0
    for event in program.events or ():
        left += event.nbytes
        yield event.instruction, event.nbytes
    if left:
        yield HELD, -left
