"""The chart of a study: running time by phase, throughput, efficiency and final loss, by number of processes.

Bars and points are medians, whiskers are quartiles, and the ideal is dotted. A size that failed keeps its place on the
axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.core.optional import require
from footplate.scaling.results import PAYS, PHASES, Size, Spread, Study, base_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, MAIN, IDEAL = "#1f2937", "#e5e7eb", "#2563eb", "#94a3b8"
COLOURS = {"step": "#2563eb", "data": "#f59e0b", "validation": "#10b981", "other": "#8b5cf6"}
NAMES = {"step": "steps", "data": "waiting for batches", "validation": "validation", "other": "the rest"}
START = "#d1d5db"
TITLE: dict[str, Any] = {"color": INK, "loc": "left", "fontweight": "bold", "pad": 10}


def draw(study: Study, path: Path) -> Path:
    """Draw the chart of a study into a PNG file; returns its path.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figures = require("matplotlib.figure", "plot", "The chart of a scaling study")
    figure = figures.Figure(figsize=(11, 8), dpi=110, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    figure.suptitle(f"Scaling of {study.setup.name}", color=INK, x=0.01, ha="left", fontweight="bold", fontsize=14)

    time, throughput, efficiency, loss = figure.subplots(2, 2).flat
    sizes, base = study.sizes, base_of(study.sizes)
    _draw_time(time, sizes, base)
    _draw_points(throughput, sizes, lambda size: size.samples_per_second, "Throughput, samples/s")
    _draw_points(efficiency, sizes, _efficiency, "Efficiency")
    _draw_points(loss, sizes, lambda size: size.loss, f"Final {study.setup.monitor}")

    if base is not None and base.samples_per_second is not None:
        rate = base.samples_per_second.median / base.np
        throughput.plot(
            range(len(sizes)), [rate * size.np for size in sizes], color=IDEAL, linestyle=":", label="ideal"
        )
        throughput.legend(frameon=False, labelcolor=INK)
    throughput.set_ylim(bottom=0)
    efficiency.axhline(1, color=IDEAL, linestyle=":")
    efficiency.axhline(PAYS, color="#dc2626", linewidth=1)
    efficiency.set_ylim(0, max([1.1, *(1.1 * size.efficiency for size in sizes if size.efficiency is not None)]))
    figure.savefig(path)
    return path


def _draw_time(axes: Axes, sizes: Sequence[Size], base: Size | None) -> None:
    """Draw stacked bars: start-up, then the phases, or the whole time if the phases are unknown."""
    bottoms = [0.0] * len(sizes)
    for name, colour, seconds in _layers(sizes):
        if any(seconds):
            axes.bar(range(len(sizes)), seconds, bottom=bottoms, width=0.6, color=colour, label=name)
        bottoms = [below + more for below, more in zip(bottoms, seconds, strict=True)]
    if base is not None and base.seconds is not None:
        start = [_start_up(size) for size in sizes]
        ideal = [begin + base.seconds.median * base.np / size.np for begin, size in zip(start, sizes, strict=True)]
        axes.plot(range(len(sizes)), ideal, color=INK, linestyle=":", marker="_", markersize=24, label="ideal")
        # The legend needs space above the bars.
        axes.set_ylim(top=1.35 * max(axes.get_ylim()[1], *ideal))
        axes.legend(loc="upper center", ncols=3, frameon=False, labelcolor=INK, fontsize=9)
    _style(axes, sizes, "Running time, s")


def _layers(sizes: Sequence[Size]) -> list[tuple[str, str, list[float]]]:
    """Name, colour and seconds for each size of each layer. The seconds of a size add up to its median time."""
    layers = [("start-up", START, [_start_up(size) for size in sizes])]
    for name in PHASES:
        layers.append((NAMES[name], COLOURS[name], [_seconds(size) * size.shares.get(name, 0.0) for size in sizes]))
    layers.append(("training", MAIN, [0.0 if size.shares else _seconds(size) for size in sizes]))
    return layers


def _draw_points(axes: Axes, sizes: Sequence[Size], value_of: Callable[[Size], Spread | None], title: str) -> None:
    points = [(index, value) for index, value in enumerate(map(value_of, sizes)) if value is not None]
    if points:
        positions, values = zip(*points, strict=True)
        medians = [value.median for value in values]
        whiskers = [
            [value.median - value.low for value in values],
            [value.high - value.median for value in values],
        ]
        axes.errorbar(positions, medians, yerr=whiskers, color=MAIN, marker="o", markersize=5, capsize=4)
    else:
        axes.text(0.5, 0.5, "not reported", transform=axes.transAxes, ha="center", color=IDEAL)
    _style(axes, sizes, title)


def _style(axes: Axes, sizes: Sequence[Size], title: str) -> None:
    axes.set_title(title, **TITLE)
    axes.set_xlabel("processes", color=INK)
    axes.set_xticks(range(len(sizes)), [str(size.np) if size.done else f"{size.np}\nfailed" for size in sizes])
    axes.set_xlim(-0.6, len(sizes) - 0.4)
    axes.grid(axis="y", color=FAINT)
    axes.set_axisbelow(True)
    axes.spines[:].set_color(FAINT)
    axes.tick_params(length=0, labelcolor=INK)


def _efficiency(size: Size) -> Spread | None:
    return None if size.efficiency is None else Spread(size.efficiency, size.efficiency, size.efficiency)


def _seconds(size: Size) -> float:
    return size.seconds.median if size.seconds is not None else 0.0


def _start_up(size: Size) -> float:
    return max(0.0, size.wall_s.median - _seconds(size)) if size.wall_s is not None else 0.0
