"""A `Plan`: the choices, the cheapest and the fastest of them, and their form as text, as plain values and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from footplate.catalog.rows import catalog
from footplate.core import html
from footplate.planning.choices import Choice, Measured, usd_per_sample
from footplate.planning.layouts import Layout
from footplate.planning.subject import Subject

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = (
    "on", "by", "batch", "fits", "memory", "of", "TFLOP", "GB moved", "MB sent",
    "step ≥", "bound by", "samples/s ≤", "time ≥", "price ≥", "largest batch",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A plan. Print it, or read `choices`.

    Attributes:
        subject: the training that was planned.
        choices: one for each target, in the order of `on`.
        measured: some steps on this machine, beside the prediction; None unless you asked for it.
    """

    subject: Subject
    choices: tuple[Choice, ...]
    measured: Measured | None = None

    @property
    def fastest(self) -> Choice | None:
        """The choice with the shortest training, among those that fit."""
        return _least(self.choices, lambda choice: choice.samples_per_second and -choice.samples_per_second)

    @property
    def cheapest(self) -> Choice | None:
        """The choice with the lowest price of a sample, among those that fit and have a known price."""
        return _least(self.choices, usd_per_sample)

    def to_dict(self) -> dict[str, Any]:
        """Convert the plan to plain values, as `--format json` prints them."""
        return to_dict(self)

    def __str__(self) -> str:
        return to_text(self)

    def _repr_html_(self) -> str:
        rows = [_cells(choice) for choice in self.choices]
        return html.card(_title(self), html.grid(COLUMNS, rows), html.notes(_notes(self)))


def _least(choices: Sequence[Choice], value_of: Callable[[Choice], float | None]) -> Choice | None:
    """The choice with the smallest value, among those that fit and have a value. Of equal ones, the first."""
    ranked = [
        (value, index)
        for index, choice in enumerate(choices)
        if choice.fits and (value := value_of(choice)) is not None
    ]
    return choices[min(ranked)[1]] if ranked else None


def to_dict(plan: Plan) -> dict[str, Any]:
    """Convert a plan to plain values: bytes and seconds, for one device unless the name says otherwise."""
    subject = plan.subject
    return {
        "model": subject.name,
        "precision": subject.precision,
        "batch_size": subject.batch_size,
        "dataset_rows": subject.rows,
        "epochs": subject.epochs,
        "assumed": list(subject.assumed),
        "choices": [_choice(choice) for choice in plan.choices],
        "measured": asdict(plan.measured) if plan.measured else None,
        "cheapest": plan.cheapest.target.name if plan.cheapest else None,
        "fastest": plan.fastest.target.name if plan.fastest else None,
    }


def _choice(choice: Choice) -> dict[str, Any]:
    target, row, times = choice.target, choice.target.accelerator, choice.roofline
    return {
        "on": target.name,
        "kind": target.kind,
        "devices": target.devices,
        "layout": _layout(choice),
        "strategy": choice.strategy,
        "batch_size": choice.batch_size,
        "batch_per_device": choice.per_device,
        "fits": choice.fits,
        "memory": {**asdict(choice.memory), "headroom": choice.memory.headroom},
        "flops": choice.flops,
        "bytes_moved": choice.nbytes,
        "bytes_accessed": choice.accessed,
        "collectives": [asdict(collective) for collective in choice.collectives],
        "compute_s": times.compute_s,
        "memory_s": times.memory_s,
        "interconnect_s": times.interconnect_s,
        "kernels_s": times.kernels_s,
        "step_s": times.step_s,
        "bound_by": times.roof,
        "samples_per_second": choice.samples_per_second,
        "hours": choice.hours,
        "usd": choice.usd,
        "usd_per_hour": target.usd_per_hour,
        "usd_per_million_samples": _times(usd_per_sample(choice), 1e6),
        "priced": target.machine,
        "largest_batch": choice.largest_batch,
        "largest_batch_searched": choice.searched,
        "counted_by": choice.counted_by,
        "compile_s": choice.compile_s,
        "problem": choice.problem,
        "rejected": list(choice.rejected),
        "sources": _sources(choice),
        "as_of": row.as_of if row else None,
    }


def to_table(plan: Plan) -> RenderableType:
    """Draw a plan for the terminal: a table, and notes below it."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(*COLUMNS, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    table.columns[1].no_wrap = True
    for choice in plan.choices:
        table.add_row(*_cells(choice))
    return Group(Text(_title(plan)), table, *(Text(line) for line in _notes(plan)))


def to_text(plan: Plan) -> str:
    """Render the table and the notes as text."""
    from rich.console import Console

    console = Console(width=170, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(to_table(plan))
    return capture.get()


def _title(plan: Plan) -> str:
    subject = plan.subject
    length = f", {subject.rows:,} rows × {subject.epochs} epochs" if subject.rows else ""
    batch = (
        "the best batch of each" if subject.free_batch else f"batch of {subject.batch_size:,} on all devices together"
    )
    return f"{subject.name}, {subject.precision}, {batch}{length}"


def _layout(choice: Choice) -> str:
    return str(choice.layout or Layout("ddp", choice.target.devices))


def _cells(choice: Choice) -> list[str]:
    memory, times, target = choice.memory, choice.roofline, choice.target
    sent = sum(collective.nbytes for collective in choice.collectives)
    return [
        target.name,
        _layout(choice),
        f"{choice.per_device} × {choice.batch_size // choice.per_device}",
        "yes" if choice.fits else "NO",
        _gib(memory.peak),
        _gib(memory.limit),
        _number(choice.flops, 1e12),
        _number(choice.nbytes, 1e9),
        _number(sent, 1e6) if target.devices > 1 and choice.fits else "",
        _seconds(times.step_s),
        times.roof or "?",
        "?" if choice.samples_per_second is None else f"{choice.samples_per_second:,.0f}",
        "" if choice.hours is None else _duration(choice.hours),
        "unknown" if target.usd_per_hour is None else "" if choice.usd is None else _usd(choice.usd),
        "none" if choice.largest_batch is None else f"{'' if choice.searched else '≈ '}{choice.largest_batch:,}",
    ]


def _notes(plan: Plan) -> list[str]:
    lines = [f"Assumed: {assumption}" for assumption in plan.subject.assumed]
    lines += [f"{choice.target.name}: {choice.problem}" for choice in plan.choices if choice.problem]
    for choice in plan.choices:
        if choice.strategy and choice.target.devices > 1:
            lines.append(f"{choice.target.name}: {choice.layout} is strategy={choice.strategy}.")
        if choice.rejected:
            lines.append(f"{choice.target.name}: not {'; '.join(choice.rejected)}.")
    lines += _between_machines(plan)
    unknown = [
        choice.target.name
        for choice in plan.choices
        if choice.fits and choice.roofline.interconnect_s is None and choice.nbytes
    ]
    if unknown:
        lines.append(
            f"The catalog has no interconnect rate of {', '.join(unknown)}: their step times don't include sending."
        )

    if plan.fastest:
        lines.append(f"Fastest: {plan.fastest.target.name}.")
    if plan.cheapest:
        least = usd_per_sample(plan.cheapest) or 0.0
        lines.append(
            f"Cheapest with a known price: {plan.cheapest.target.name}, ${least * 1e6:,.3g} a million samples."
        )

    for choice in plan.choices:
        row, target = choice.target.accelerator, choice.target
        price = "no price known" if target.usd_per_hour is None else f"${target.usd_per_hour:,.2f}/h"
        dated = f" (catalog of {row.as_of}: {row.source})" if row else " (rates measured here)"
        machine = target.machine or "a part of a machine, not rented alone"
        lines.append(f"{target.name}: {machine}, {price}{dated}")
    lines.append("Memory, TFLOP and GB are for one device and step. Times are the least at peak rates, not forecasts.")

    if plan.measured:
        measured = plan.measured
        lines.append(
            f"Measured on this CPU: {_seconds(measured.xla_step_s)} a step by XLA, {_seconds(measured.eager_step_s)} by "
            f"eager torch (the least: {_seconds(measured.least_step_s)}); {_gib(measured.peak_bytes)} of memory "
            f"(predicted: {_gib(measured.predicted_peak_bytes)})."
        )
    return lines


def _between_machines(plan: Plan) -> list[str]:
    """Say for which targets the rate between machines isn't known."""
    several = [
        choice.target.name
        for choice in plan.choices
        if choice.target.kind == "gpu" and choice.target.devices > choice.target.machine_devices
    ]
    names = ", ".join(several)
    return [f"{names}: the catalog has no rate between machines; sending is at the rate within one."] if several else []


def _sources(choice: Choice) -> list[str]:
    row = choice.target.accelerator
    return [catalog().sources[key.strip()].url for key in row.source.split(";")] if row else []


def _gib(nbytes: int | None) -> str:
    if nbytes is None:
        return "?"
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 / 10 else f"{nbytes / 2**20:.1f} MiB"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _duration(hours: float) -> str:
    """Format hours as seconds, minutes or hours."""
    if hours < 1 / 60:
        return f"{hours * 3600:.2g} s"
    return f"{hours * 60:.2g} min" if hours < 1 else f"{hours:,.3g} h"


def _usd(value: float) -> str:
    return f"${value:,.2f}" if value >= 0.01 else "< 1 ¢"


def _number(value: float | None, unit: float) -> str:
    return "?" if value is None else f"{value / unit:.3g}"


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
