"""A plan for people and for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from footplate.jobs.catalog.rows import catalog
from footplate.planning.choices import Choice, Plan, usd_per_sample

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = (
    "on", "batch", "fits", "memory", "of", "TFLOP", "GB moved", "MB sent",
    "step ≥", "bound by", "samples/s ≤", "time ≥", "price ≥", "largest batch",
)  # fmt: skip


def to_dict(plan: Plan) -> dict[str, Any]:
    """A plan as plain values; sizes in bytes, times in seconds, for one device unless the name says otherwise."""
    about = plan.subject
    return {
        "model": about.name,
        "precision": about.precision,
        "batch_size": about.batch_size,
        "dataset_rows": about.rows,
        "epochs": about.epochs,
        "assumed": list(about.assumed),
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
        "batch_per_device": choice.per_device,
        "fits": choice.fits,
        "memory": {**asdict(choice.memory), "headroom": choice.memory.headroom},
        "flops": choice.flops,
        "bytes_moved": choice.nbytes,
        "bytes_accessed": choice.accessed,
        "collectives": [asdict(one) for one in choice.collectives],
        "compute_s": times.compute_s,
        "memory_s": times.memory_s,
        "interconnect_s": times.interconnect_s,
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
        "sources": _sources(choice),
        "as_of": row.as_of if row else None,
    }


def to_table(plan: Plan) -> RenderableType:
    """A plan as a drawing for the terminal: the table, and below it what to know."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    made = Table(*COLUMNS, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in made.columns[1:]:
        column.justify = "right"
    for choice in plan.choices:
        made.add_row(*_cells(choice))
    return Group(Text(_title(plan)), made, *(Text(line) for line in _notes(plan)))


def to_text(plan: Plan) -> str:
    """`to_table` as text."""
    from rich.console import Console

    console = Console(width=150, highlight=False, color_system=None)
    with console.capture() as caught:
        console.print(to_table(plan))
    return caught.get()


def _title(plan: Plan) -> str:
    about = plan.subject
    length = f", {about.rows:,} rows × {about.epochs} epochs" if about.rows else ""
    return f"{about.name}, {about.precision}, batch of {about.batch_size:,} on all devices together{length}"


def _cells(choice: Choice) -> list[str]:
    memory, times, target = choice.memory, choice.roofline, choice.target
    sent = sum(one.nbytes for one in choice.collectives)
    return [
        target.name,
        f"{choice.per_device} × {target.devices}",
        "yes" if choice.fits else "NO",
        _gib(memory.peak),
        _gib(memory.limit),
        _number(choice.flops, 1e12),
        _number(choice.nbytes, 1e9),
        _number(sent, 1e6) if target.devices > 1 and choice.fits else "",
        _seconds(times.step_s),
        times.roof or "?",
        "?" if choice.samples_per_second is None else f"{choice.samples_per_second:,.0f}",
        "" if choice.hours is None else _long(choice.hours),
        "unknown" if target.usd_per_hour is None else "" if choice.usd is None else _usd(choice.usd),
        "none" if choice.largest_batch is None else f"{'' if choice.searched else '≈ '}{choice.largest_batch:,}",
    ]


def _notes(plan: Plan) -> list[str]:
    lines = [f"Assumed: {one}" for one in plan.subject.assumed]
    lines += [f"{choice.target.name}: {choice.problem}" for choice in plan.choices if choice.problem]
    unknown = [
        one.target.name for one in plan.choices if one.fits and one.roofline.interconnect_s is None and one.nbytes
    ]
    if unknown:
        lines.append(
            f"The catalog has no interconnect rate of {', '.join(unknown)}: their steps are reckoned without it."
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
        lines.append(f"{target.name}: {target.machine}, {price}{dated}")
    lines.append("Memory, TFLOP and GB: of one device and step. Times: the least that peak rates allow, no forecasts.")
    if plan.measured:
        found = plan.measured
        lines.append(
            f"Measured on this CPU: {_seconds(found.xla_step_s)} a step by XLA, {_seconds(found.eager_step_s)} by eager "
            f"torch, where {_seconds(found.least_step_s)} was the least; {_gib(found.peak_bytes)} of memory, where "
            f"{_gib(found.predicted_peak_bytes)} was predicted."
        )
    return lines


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


def _long(hours: float) -> str:
    """Hours for people."""
    if hours < 1 / 60:
        return f"{hours * 3600:.2g} s"
    return f"{hours * 60:.2g} min" if hours < 1 else f"{hours:,.3g} h"


def _usd(value: float) -> str:
    return f"${value:,.2f}" if value >= 0.01 else "< 1 ¢"


def _number(value: float | None, unit: float) -> str:
    return "?" if value is None else f"{value / unit:.3g}"


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
