"""A plan as a picture: the memory of a device, the three least times of a step, and the price of a million samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.core.optional import require
from footplate.planning.choices import Choice, usd_per_sample
from footplate.planning.report import Plan
from footplate.planning.roofline import ROOFS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, OVER = "#1f2937", "#e5e7eb", "#dc2626"
COLOURS = {"compute": "#2563eb", "memory": "#f59e0b", "interconnect": "#10b981"}
TITLE: dict[str, Any] = {"color": INK, "loc": "left", "fontweight": "bold", "pad": 10}


def draw(plan: Plan, path: Path) -> Path:
    """Draw a plan into a PNG or SVG file; returns its path.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figures = require("matplotlib.figure", "plot", "The chart of a plan")
    height = 2.2 + 0.55 * len(plan.choices)
    figure = figures.Figure(figsize=(13, height), dpi=110, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
    subject = plan.subject
    figure.suptitle(
        f"{subject.name}, {subject.precision}, batch of {subject.batch_size:,}",
        color=INK,
        x=0.01,
        ha="left",
        fontweight="bold",
    )

    memory, times, price = figure.subplots(1, 3, sharey=True)
    _draw_memory(memory, plan.choices)
    _draw_times(times, plan.choices)
    _draw_price(price, plan.choices)
    memory.set_yticks(range(len(plan.choices)), [choice.target.name for choice in plan.choices])
    memory.set_ylim(len(plan.choices) - 0.4, -0.6)
    figure.savefig(path)
    return path


def _draw_memory(axes: Axes, choices: Sequence[Choice]) -> None:
    for row, choice in enumerate(choices):
        peak, limit = choice.memory.peak, choice.memory.limit
        part = 100.0 if peak is None else 100 * peak / limit
        axes.barh(row, min(part, 150), height=0.55, color=COLOURS["compute"] if choice.fits else OVER)
        label = "doesn't fit" if not choice.fits else f"{part:.1f} %" if part >= 0.1 else "< 0.1 %"
        axes.text(min(part, 150) + 2, row, label, va="center", color=INK, fontsize=9)
    axes.axvline(100, color=OVER, linewidth=1)
    axes.set_xlim(0, 180)
    _style(axes, "Memory of a device, % of its total")


def _draw_times(axes: Axes, choices: Sequence[Choice]) -> None:
    """Draw three thin bars for each target. The longest of them is the least time of a step."""
    for offset, roof in zip((-0.2, 0.0, 0.2), ROOFS, strict=True):
        times = [(row, getattr(choice.roofline, f"{roof}_s")) for row, choice in enumerate(choices)]
        bars = [(row, 1e3 * seconds) for row, seconds in times if seconds]
        if bars:
            rows, values = zip(*bars, strict=True)
            axes.barh([row + offset for row in rows], values, height=0.18, color=COLOURS[roof], label=roof)
    if axes.patches:
        axes.set_xscale("log")
        axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, -0.45), ncols=3)
    _style(axes, "Least time of a step, ms, by each rate")


def _draw_price(axes: Axes, choices: Sequence[Choice]) -> None:
    most = max([1e6 * price for price in map(usd_per_sample, choices) if price is not None], default=1.0)
    for row, choice in enumerate(choices):
        price = usd_per_sample(choice)
        if price is None:
            axes.text(
                0.02 * most, row, "unknown" if choice.fits else "doesn't fit", va="center", color="#94a3b8", fontsize=9
            )
        else:
            axes.barh(row, 1e6 * price, height=0.55, color="#8b5cf6")
            axes.text(1e6 * price + 0.02 * most, row, f"${1e6 * price:,.3g}", va="center", color=INK, fontsize=9)
    axes.set_xlim(0, 1.25 * most)
    _style(axes, "Least price of a million samples, $")


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10, **TITLE)
    axes.grid(axis="x", color=FAINT)
    axes.set_axisbelow(True)
    axes.spines[:].set_color(FAINT)
    axes.tick_params(length=0, labelcolor=INK)
