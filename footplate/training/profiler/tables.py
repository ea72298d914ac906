"""The results of a profile: plain data, Markdown, CSV, and a summary of ten lines."""

from __future__ import annotations

import csv
import functools
import io
import linecache
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROWS = 100
_SUMMARY_ROWS = 3
_PACKAGE = str(Path(__file__).parents[2]) + "/"
# The demo is an example of a user's code.
_DEMO = _PACKAGE + "demo/"


@dataclass(frozen=True)
class Line:
    """A line of the user's code."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.short}:{self.number}"

    @property
    def short(self) -> str:
        """The file, relative to the working directory if it is below it."""
        with_slash = str(Path.cwd()) + "/"
        return self.file.removeprefix(with_slash)

    @property
    def source(self) -> str:
        """The line's text; empty if the file isn't there."""
        return linecache.getline(self.file, self.number).strip()


@dataclass
class OperatorRow:
    """An operator. `self_ns` is without the operators in it. `device_ns` is the time of its kernels on a GPU."""

    name: str
    calls: int = 0
    self_ns: int = 0
    total_ns: int = 0
    device_ns: int = 0
    self_bytes: int = 0


@dataclass
class LineRow:
    """A line of the user's code.

    Attributes:
        line: the line.
        self_ns: its time in the thread that trains, with the libraries that it calls, without other lines of the user's.
        backward_ns: the time of the backward operators of its operators.
        beside_ns: its time in other threads, such as those of a loader.
        device_ns: the time of its kernels on a GPU, forward and backward.
        allocated_bytes: everything that it allocated, freed or not.
        operators: its operators, with their own times.
    """

    line: Line
    self_ns: int = 0
    backward_ns: int = 0
    beside_ns: int = 0
    device_ns: int = 0
    allocated_bytes: int = 0
    operators: Counter[str] = field(default_factory=Counter)

    @property
    def time_ns(self) -> int:
        """The time in the thread that trains, forward and backward."""
        return self.self_ns + self.backward_ns


@dataclass
class RegionRow:
    """A named region: a phase of the step, or a block of the user's (`trainer.profiler.profile`, `record_function`)."""

    name: str
    calls: int = 0
    total_ns: int = 0


@dataclass(frozen=True)
class Allocation:
    """Memory that was allocated, or freed (`nbytes` < 0). Totals count from the beginning of the profile on a CPU."""

    time_ms: float
    step: int
    device: str
    nbytes: int
    allocated_bytes: int
    reserved_bytes: int
    operator: str
    line: Line | None


@dataclass
class Results:
    """The results of a profile on one rank. None stands for what was not recorded.

    Attributes:
        tool: the profiler that recorded.
        steps_ns: the duration of each recorded step.
        phases_ns: the time of each phase, without phases in it.
        regions: named regions.
        operators: operators, the longest first.
        lines: lines of the user's code, the longest first.
        other_ns: the time of the training thread outside of the user's code, by phase.
        allocations: in time order.
        notes: what isn't there, and why.
        about: what the times of operators and lines are.
    """

    tool: str
    steps_ns: list[int]
    phases_ns: Mapping[str, int] = field(default_factory=dict)
    regions: Sequence[RegionRow] = ()
    operators: Sequence[OperatorRow] = ()
    lines: Sequence[LineRow] | None = None
    other_ns: Mapping[str, int] = field(default_factory=dict)
    allocations: Sequence[Allocation] | None = None
    notes: Sequence[str] = ()
    about: str = "Lines are those of the thread that trains. Operators of several threads may overlap."

    @property
    def total_ns(self) -> int:
        """The duration of all recorded steps."""
        return sum(self.steps_ns)


# The user's files


def user_files() -> tuple[Sequence[str], Sequence[str]]:
    """The folders in which torch looks for the short names that it gives to files, and the folders of libraries."""
    folders = [str(Path(entry or ".").absolute()) + "/" for entry in sys.path]
    paths = sysconfig.get_paths()
    libraries = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return [*folders, str(Path(torch.__file__).parents[1]) + "/"], sorted(library + "/" for library in libraries)


class User:
    """Tells the user's files from those of Python, of libraries and of Footplate.

    torch removes the folders of `sys.path` from the names of files, so `models/net.py` may be any of several files. The
    first folder that has it counts, as in an import.
    """

    def __init__(self, files: tuple[Sequence[str], Sequence[str]]) -> None:
        self._folders, self._libraries = files
        self.path = functools.cache(self._path)

    def line(self, file: str, number: int, function: str) -> Line | None:
        """The line, if it is the user's."""
        path = self.path(file)
        return None if path is None else Line(path, number, function)

    def is_footplate(self, file: str) -> bool:
        """Return True for a file of Footplate."""
        return self._whole(file).startswith(_PACKAGE)

    def _path(self, file: str) -> str | None:
        """The whole path of a user's file; None for any other file."""
        if not file or (file.startswith("<") and not file.startswith("<ipython-input")):
            return None
        path = self._whole(file)
        if "/site-packages/" in path or "/dist-packages/" in path:
            return None
        if path.startswith(_PACKAGE) and not path.startswith(_DEMO):
            return None
        return None if path.startswith(tuple(self._libraries)) else path

    def _whole(self, file: str) -> str:
        if file.startswith("/"):
            return file
        return next((folder + file for folder in self._folders if Path(folder + file).is_file()), file)


# Markdown


def operators_table(results: Results, title: str) -> str:
    """The table by operator, as Markdown."""
    steps, total_ns = max(1, len(results.steps_ns)), max(1, results.total_ns)
    on_device = any(row.device_ns for row in results.operators)
    heads = ["operator", "calls", "self ms", "%", "total ms", "self µs a call"]
    heads += ["kernels ms", "kernels %"] if on_device else []
    heads += ["self MiB"] if results.allocations is not None else []
    rows = [
        [
            row.name, f"{row.calls:,}", _ms(row.self_ns), _percent(row.self_ns, total_ns), _ms(row.total_ns),
            f"{row.self_ns / 1e3 / max(1, row.calls):,.1f}",
            *([_ms(row.device_ns), _percent(row.device_ns, total_ns)] if on_device else []),
            *([_mib(row.self_bytes)] if results.allocations is not None else []),
        ]
        for row in results.operators[:ROWS]
    ]  # fmt: skip
    parts = [
        f"# Operators: {title}", "",
        f"Times of all {steps} steps together. % is the share of their {_ms(results.total_ns)} ms. *self* is without the "
        f"operators that an operator calls. {results.about}", "",
        *(_table(heads, rows) if rows else ["No operator was recorded."]),
        *_more(results.operators),
    ]  # fmt: skip
    if results.regions:
        shown = [
            [row.name, f"{row.calls:,}", _ms(row.total_ns), _percent(row.total_ns, total_ns)]
            for row in results.regions[:ROWS]
        ]
        parts += ["", "## Named regions", "", "Phases of a step, and blocks with a name of your own.", ""]
        parts += _table(["region", "calls", "total ms", "%"], shown)
    return "\n".join([*parts, *(line for note in results.notes for line in ("", note)), ""])


def lines_table(results: Results, title: str) -> str:
    """The table by line of the user's code, as Markdown."""
    parts = [f"# Your lines: {title}", ""]
    if results.lines is None:
        # Without operations, a note tells why.
        reasons = results.notes or ["`with_stack=False`: Python's calls were not recorded."]
        return "\n".join([*parts, *reasons, ""])
    total_ns = max(1, results.total_ns)
    on_device = any(row.device_ns for row in results.lines)
    heads = ["line", "self ms", "backward ms", "%", *(["kernels ms"] if on_device else [])]
    heads += [*(["MiB"] if results.allocations is not None else []), "code", "operators"]
    rows = [
        [
            str(row.line), _ms(row.self_ns), _ms(row.backward_ns), _percent(row.time_ns, total_ns),
            *([_ms(row.device_ns)] if on_device else []),
            *([_mib(row.allocated_bytes)] if results.allocations is not None else []), _code(row.line.source),
            ", ".join(name.removeprefix("aten::") for name, _ in row.operators.most_common(3)),
        ]
        for row in results.lines[:ROWS] if row.time_ns
    ]  # fmt: skip
    allocated = "*MiB* is all that it allocated. " if results.allocations is not None else ""
    parts += [
        f"Times of all {len(results.steps_ns)} steps together. % is the share of their "
        f"{_ms(results.total_ns)} ms. *self* is the line with the libraries that it calls, without your lines that it "
        f"calls. *backward* is the backward pass of its operators. {allocated}{results.about}", "",
        *(_table(heads, rows) if rows else ["No line of yours took part in these steps."]),
        *_more(results.lines),
    ]  # fmt: skip
    if results.other_ns:
        others = sorted(results.other_ns.items(), key=lambda item: -item[1])
        parts += ["", "## Outside of your code", "", "Footplate, torch, and waiting, by phase of the step.", ""]
        shown = [[name, _ms(time_ns), _percent(time_ns, total_ns)] for name, time_ns in others if time_ns]
        parts += _table(["phase", "ms", "%"], shown)
    beside = sorted((row for row in results.lines if row.beside_ns), key=lambda row: -row.beside_ns)
    if beside:
        about = "Your lines in other threads, such as a loader's. They run beside the steps."
        parts += ["", "## Other threads", "", about, ""]
        shown = [[str(row.line), _ms(row.beside_ns), _code(row.line.source)] for row in beside[:ROWS]]
        parts += _table(["line", "self ms", "code"], shown)
    return "\n".join([*parts, *(line for note in results.notes for line in ("", note)), ""])


def memory_table(allocations: Iterable[Allocation], first: int) -> str:
    """Allocations in time order, as CSV.

    Args:
        allocations: the allocations.
        first: the number of the first recorded step.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["time_ms", "step", "device", "bytes", "allocated_bytes", "reserved_bytes", "operator", "line"])
    shown = functools.cache(str)
    for row in allocations:
        line = "" if row.line is None else shown(row.line)
        numbers = (row.nbytes, row.allocated_bytes, row.reserved_bytes)
        writer.writerow([f"{row.time_ms:.4f}", first + row.step, row.device, *numbers, row.operator, line])
    return text.getvalue()


def summary(results: Results, title: str, directory: Path, files: Sequence[str]) -> str:
    """The most important results, in at most ten lines."""
    total_ns = max(1, results.total_ns)
    each_ms = results.total_ns / max(1, len(results.steps_ns)) / 1e6
    text = [f"Profile of {title}: {each_ms:,.2f} ms a step while it was recorded ({results.tool})"]
    if results.phases_ns:
        phases = sorted(results.phases_ns.items(), key=lambda item: -item[1])
        text.append("  phases     " + ", ".join(f"{name} {_percent(time_ns, total_ns)}%" for name, time_ns in phases))
    operators = [
        f"{row.name} {_percent(max(row.self_ns, row.device_ns), total_ns)}%"
        for row in results.operators[:_SUMMARY_ROWS]
    ]
    text.append("  operators  " + (", ".join(operators) or "none"))
    for index, row in enumerate((results.lines or ())[:_SUMMARY_ROWS]):
        head = "  your lines " if index == 0 else " " * 13
        text.append(f"{head}{row.line} {_percent(row.time_ns, total_ns)}%  {row.line.source[:70]}")
    peak = max(results.allocations or (), key=lambda row: row.allocated_bytes, default=None)
    if peak is not None:
        where = f" at {peak.line}" if peak.line else ""
        text.append(f"  memory     peak {_mib(peak.allocated_bytes)} MiB in {peak.operator or 'no operator'}{where}")
    text += [f"  note       {note}" for note in results.notes[:1]]
    trace = next((name for name in files if name.startswith("trace-")), None)
    if trace is not None:
        text.append(f"  trace      {directory / trace} (open it in https://ui.perfetto.dev)")
    text.append(f"  tables     {', '.join(name for name in files if name != trace)}")
    return "\n".join(text)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    numbers = {index for index, head in enumerate(heads) if head.endswith(("ms", "%", "MiB", "calls", "call"))}
    cells = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(len(row[index]) for row in [list(heads), *cells]) for index in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = [("-" * (width - 1) + ":") if index in numbers else "-" * width for index, width in enumerate(widths)]
    return [line(list(heads)), line(rule), *map(line, cells)]


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _code(source: str) -> str:
    return f"`{source[:80].replace('`', chr(39))}`" if source else ""


def _more(rows: Sequence[Any]) -> list[str]:
    return ["", f"{len(rows) - ROWS:,} more are in the trace."] if len(rows) > ROWS else []


def _ms(time_ns: float) -> str:
    return f"{time_ns / 1e6:,.3f}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.2f}"
