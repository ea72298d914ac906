"""Descriptions of charts, as plain values that the page's script hands to plotly.js.

A `Chart` is one of two kinds:

- curves: series by step, with the page's controls for smoothing, the logarithmic axis and the horizontal axis
- a figure: traces and a layout of plotly

Colours are names ("c0" … "c13"), which the script replaces with those of the light or the dark page. Plotly reads a few
tags in texts, so `plain` escapes every text that comes from data. Values that are not finite become null, which is a gap.
"""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from footplate.reporting.formats import count, duration, number
from footplate.reporting.html import Html, tag
from footplate.reporting.metrics_file import Series
from footplate.reporting.monitor_log import Attempt, Window, merged
from footplate.reporting.table_statistics import Column
from footplate.reporting.thinning import thin

COLOURS = 10
MOST_WINDOWS = 150
MOST_CLASSES = 30
BOUND = 1e290  # plotly computes with sums and differences of values, which must not overflow
DASHES = {"train": "solid", "val": "dash", "test": "dot"}

CAUSES = {
    "input": ("waiting for input", 1),
    "transfer": ("host → device", 6),
    "forward": ("forward", 0),
    "backward": ("backward", 5),
    "optimizer": ("optimizer", 2),
    "communication": ("communication", 3),
    "step": ("step", 10),
    "dispatch": ("dispatch", 12),
    "compilation": ("compilation", 13),
    "callbacks": ("callbacks", 8),
    "logging": ("logging", 9),
    "checkpoint": ("checkpoints", 4),
    "validation": ("validation", 7),
    "setup": ("setup", 11),
}
"""Descriptions and colours of the causes of a window."""


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        title: its heading, as it is in the data.
        summary: what it shows, in words, for a screen reader.
        content: what the script draws.
        note: a sentence below it.
        wide: it takes the whole width of the page.
        is_matrix: its cells should be about square.
    """

    title: str
    summary: str
    content: Mapping[str, Any]
    note: str = ""
    wide: bool = False
    is_matrix: bool = False

    def draw(self) -> Html:
        """Make the element that the script draws into, with the data beside it."""
        # A browser ends a script at its tag, also inside a string.
        data = json.dumps(self.content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        canvas = tag("div", class_="canvas", role="img", aria_label=f"{self.title}. {self.summary}")
        note = tag("p", self.note, class_="note") if self.note else ""
        script = tag("script", Html(data), type="application/json")
        kind = "chart" + " wide-chart" * self.wide + " matrix" * self.is_matrix
        return tag("figure", tag("figcaption", self.title), canvas, script, note, class_=kind)


@dataclass(frozen=True)
class Curve:
    """A series to draw.

    Attributes:
        series: its steps and values.
        label: its name in the legend.
        colour: the number of its colour.
        dash: "solid", "dash" or "dot".
        times: (n,) the minutes of training at each step; None if they aren't known.
    """

    series: Series
    label: str
    colour: int
    dash: str = "solid"
    times: np.ndarray | None = None


def plain(text: Any) -> str:
    """Escape a text for plotly, which reads some tags."""
    return html.escape(str(text), quote=False)


def curves_chart(title: str, curves: Sequence[Curve]) -> Chart:
    """Draw curves by step."""
    traces, notes = [], []
    for curve in curves:
        values, steps = curve.series.values, curve.series.steps
        thinned = thin(values)
        trace = {
            "name": plain(curve.label),
            "colour": f"c{curve.colour % COLOURS}",
            "dash": curve.dash,
            "x": _list(steps[thinned.index]),
            "y": _list(values[thinned.index]),
            "mean_x": _list(steps[thinned.bins]),
            "mean_y": _list(thinned.means),
        }
        if curve.times is not None:
            trace |= {"t": _list(curve.times[thinned.index]), "mean_t": _list(curve.times[thinned.bins])}
        traces.append(trace)
        if thinned.of:
            notes.append(
                f"{curve.label}: {len(thinned.index):,} of {thinned.of:,} points are drawn, the least and the greatest of "
                "each section."
            )
        if np.any(np.abs(curve.series.finite) > BOUND):
            notes.append(f"{curve.label} has values beyond ±{BOUND:.0e}, which are drawn at this bound.")
        wrong = curve.series.first_not_finite
        if wrong is not None:
            amount = len(values) - len(curve.series.finite)
            trace["broken"] = wrong
            notes.append(
                f"{curve.label} is NaN or infinite in {count(amount, 'row')} of {len(values):,}, first at step "
                f"{number(wrong)}."
            )
    content = {"kind": "curves", "curves": traces}
    return Chart(title, "; ".join(map(_in_words, curves)), content, " ".join(notes))


def time_chart(windows: Sequence[Window]) -> Chart:
    """Draw the shares of time by cause, over the steps of training."""
    shown = merged(windows, MOST_WINDOWS)
    x = [window.step for window in shown]
    minutes = _minutes(shown)
    causes = [cause for cause in CAUSES if any(cause in window.seconds for window in shown)]
    causes += sorted({cause for window in shown for cause in window.seconds} - set(CAUSES))
    traces = []
    for cause in causes:
        label, colour = CAUSES.get(cause, (cause, 9))
        shares = [window.seconds.get(cause, 0.0) / max(sum(window.seconds.values()), 1e-9) for window in shown]
        traces.append(
            {
                "type": "bar", "name": plain(label), "x": minutes, "y": [round(value, 5) for value in shares],
                "marker": {"color": f"c{colour}"}, "customdata": x, "width": _widths(shown),
                "hovertemplate": "%{y:.1%} at step %{customdata:,}",
            }
        )  # fmt: skip
    layout = {
        "barmode": "stack", "bargap": 0, "yaxis": {"tickformat": ".0%", "range": [0, 1]},
        "xaxis": {"title": {"text": "minutes of training"}},
    }  # fmt: skip
    note = "" if len(shown) == len(windows) else f"{len(windows):,} windows, merged to {len(shown):,}."
    return Chart(
        "Time by cause, over the training", f"{len(causes)} causes in {len(shown)} windows", _figure(traces, layout),
        note, wide=True,
    )  # fmt: skip


def total_time_chart(totals: Sequence[tuple[str, Mapping[str, float]]]) -> Chart:
    """Draw the whole time by cause: one bar for each run."""
    causes = [cause for cause in CAUSES if any(cause in seconds for _, seconds in totals)]
    causes += sorted({cause for _, seconds in totals for cause in seconds} - set(CAUSES))
    traces = []
    for cause in causes:
        label, colour = CAUSES.get(cause, (cause, 9))
        traces.append(
            {
                "type": "bar", "orientation": "h", "name": plain(label), "y": [plain(name) for name, _ in totals],
                "x": [seconds.get(cause, 0.0) for _, seconds in totals], "marker": {"color": f"c{colour}"},
                "hovertemplate": "%{fullData.name}: %{x:.3~s} s<extra></extra>",
            }
        )  # fmt: skip
    layout = {
        "barmode": "stack", "height": 120 + 40 * len(totals), "xaxis": {"ticksuffix": " s", "showgrid": False},
        "yaxis": {"showticklabels": len(totals) > 1, "autorange": "reversed", "type": "category", "showgrid": False},
        "hovermode": "closest", "legend": {"y": -0.45 / len(totals)},
    }  # fmt: skip
    words = "; ".join(
        f"{name}: "
        + ", ".join(f"{CAUSES.get(cause, (cause,))[0]} {duration(spent)}" for cause, spent in seconds.items())
        for name, seconds in totals
    )
    return Chart("Whole time by cause", words, _figure(traces, layout), wide=True)


def rate_chart(title: str, unit: str, series: Sequence[tuple[str, Sequence[Window], Sequence[float | None]]]) -> Chart:
    """Draw a rate or a size by time. Each series is a name, its windows, and a value for each of them."""
    traces = [
        {
            "type": "scatter", "mode": "lines" if len(windows) > 1 else "markers", "name": plain(name),
            "x": _minutes(windows), "y": [_value(value) for value in values], "customdata": [w.step for w in windows],
            "line": {"color": f"c{index % COLOURS}"}, "marker": {"color": f"c{index % COLOURS}"},
            "hovertemplate": "%{y:.4~s}" + unit + " at step %{customdata:,}",
        }
        for index, (name, windows, values) in enumerate(series)
    ]  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "minutes of training"}}, 
        "yaxis": {"rangemode": "tozero", "tickformat": "~s", "ticksuffix": unit if len(unit) == 1 else ""},
        "showlegend": len(traces) > 1,
    }  # fmt: skip
    known = [value for _, _, values in series for value in values if value is not None]
    words = f"from {number(min(known), 4)} to {number(max(known), 4)}{unit}" if known else "no values"
    return Chart(title, words, _figure(traces, layout))


def ranks_chart(attempt: Attempt) -> Chart:
    """Draw the time that each rank worked by itself, and waited for input, at the last comparison."""
    ranks = attempt.comparisons[-1].ranks
    x = [str(rank.rank) for rank in ranks]
    traces = [
        {"type": "bar", "name": name, "x": x, "y": [_value(value) for value in values], "marker": {"color": colour},
         "hovertemplate": "rank %{x}: %{y:.3~s} s"}
        for name, values, colour in (
            ("own work", [rank.own_s for rank in ranks], "c0"),
            ("waiting for input", [rank.input_s for rank in ranks], "c1"),
        )
        if any(value is not None for value in values)
    ]  # fmt: skip
    layout = {"barmode": "group", "xaxis": {"title": {"text": "rank"}, "type": "category"},
              "yaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"}}  # fmt: skip
    return Chart("Time of each rank", f"{len(ranks)} ranks", _figure(traces, layout))


def goodput_chart(ledgers: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> Chart:
    """Draw ledgers, a bar for each: its name, and its seconds by cause."""
    names, spent = [plain(name) for name, _ in ledgers], [dict(rows) for _, rows in ledgers]
    traces = [
        {"type": "bar", "orientation": "h", "name": plain(cause), "y": names,
         "x": [of_one.get(cause, 0.0) for of_one in spent],
         "marker": {"color": f"c{index % COLOURS}"}, "hovertemplate": "%{fullData.name}: %{x:.3~s} s<extra></extra>"}
        for index, cause in enumerate(dict.fromkeys(cause for of_one in spent for cause in of_one))
    ]  # fmt: skip
    layout = {
        "barmode": "stack", "height": 120 + 40 * len(ledgers), "xaxis": {"ticksuffix": " s", "showgrid": False},
        "yaxis": {"showticklabels": len(ledgers) > 1, "autorange": "reversed", "type": "category", "showgrid": False},
        "hovermode": "closest", "legend": {"y": -0.45 / len(ledgers)},
    }  # fmt: skip
    words = "; ".join(
        f"{name}: " + ", ".join(f"{cause} {duration(seconds)}" for cause, seconds in rows) for name, rows in ledgers
    )
    return Chart("Time by cause", words, _figure(traces, layout), wide=True)


def confusion_chart(names: Sequence[str], matrix: np.ndarray) -> Chart:
    """Draw a confusion matrix. Of many classes, those that are confused most are drawn."""
    wrong = matrix - np.diag(matrix.diagonal())
    note = ""
    if len(names) > MOST_CLASSES:
        kept = np.sort(np.argsort(-(wrong.sum(0) + wrong.sum(1)), kind="stable")[:MOST_CLASSES])
        note = f"{MOST_CLASSES} of {len(names):,} classes are drawn: those that are confused most."
        chosen: list[int] = kept.tolist()
        names, matrix = [names[index] for index in chosen], matrix[np.ix_(chosen, chosen)]
    # The root of the share shows rare confusions.
    shades = np.sqrt(matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1))
    axis = list(range(len(names)))
    labels = [plain(_cut(name)) for name in names]
    counts = [[str(value) if value else "" for value in row] for row in matrix.tolist()]
    trace = {
        "type": "heatmap", "x": axis, "y": axis, "z": np.round(shades, 4).tolist(), "zmin": 0, "zmax": 1,
        "text": counts, "texttemplate": "%{text}", "showscale": False, "colorscale": "page", "xgap": 1, "ygap": 1,
        "customdata": [[f"{plain(row)} → {plain(column)}" for column in names] for row in names],
        "hovertemplate": "%{customdata}: %{text}<extra></extra>",
    }  # fmt: skip
    ticks = {"tickvals": axis, "ticktext": labels, "showgrid": False, "zeroline": False}
    layout = {
        "height": max(340, 200 + 30 * len(names)),
        "xaxis": {**ticks, "title": {"text": "predicted"}, "tickangle": -40},
        "yaxis": {**ticks, "title": {"text": "true"}, "autorange": "reversed"},
        "hovermode": "closest",
    }
    words = f"{int(matrix.trace()):,} of {int(matrix.sum()):,} predictions are right"
    return Chart("Confusion matrix", words, _figure([trace], layout), note, wide=True, is_matrix=True)


def scatter_chart(labels: np.ndarray, predictions: np.ndarray, most: int = 3000) -> Chart:
    """Draw predicted by true numbers."""
    chosen = np.unique(np.linspace(0, len(labels) - 1, min(most, len(labels))).astype(np.int64))
    low, high = float(min(labels.min(), predictions.min())), float(max(labels.max(), predictions.max()))
    traces = [
        {"type": "scatter", "mode": "markers", "name": "sample", "x": _list(labels[chosen]),
         "y": _list(predictions[chosen]), "marker": {"color": "c0", "size": 5, "opacity": 0.5}},
        {"type": "scatter", "mode": "lines", "name": "right", "x": [low, high], "y": [low, high],
         "line": {"color": "c9", "dash": "dot"}, "hoverinfo": "skip"},
    ]  # fmt: skip
    layout = {"xaxis": {"title": {"text": "true"}}, "yaxis": {"title": {"text": "predicted"}}, "hovermode": "closest"}
    note = "" if len(chosen) == len(labels) else f"{len(chosen):,} of {len(labels):,} samples are drawn."
    return Chart("Predicted by true numbers", f"{len(labels):,} samples", _figure(traces, layout), note)


def column_chart(use: str, column: Column) -> Chart | None:
    """Draw the classes of a column, or the histogram of its numbers; None if it has neither."""
    title = f"{use}: {column.name}"
    if len(column.classes) > 1:
        names = [plain(_cut(str(value))) for value, _ in column.classes]
        axis = list(range(len(names)))
        trace = {
            "type": "bar", "x": axis, "y": [rows for _, rows in column.classes], "marker": {"color": "c0"},
            "customdata": names, "hovertemplate": "%{customdata}: %{y:,} rows<extra></extra>",
        }  # fmt: skip
        layout = {
            "xaxis": {"tickvals": axis, "ticktext": names}, "yaxis": {"title": {"text": "rows"}}, "showlegend": False,
            "hovermode": "closest",
        }  # fmt: skip
        words = f"{len(column.classes)} classes, of {column.classes[-1][1]:,} to {column.classes[0][1]:,} rows"
        return Chart(title, words, _figure([trace], layout))
    edges, heights = column.bins
    if not heights or edges[0] == edges[-1]:
        return None
    middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    trace = {
        "type": "bar", "x": middles, "y": list(heights), "marker": {"color": "c0"},
        "hovertemplate": "about %{x:.4~g}: %{y:,} rows<extra></extra>",
    }  # fmt: skip
    layout = {"bargap": 0.02, "yaxis": {"title": {"text": "rows"}}, "showlegend": False}
    return Chart(title, f"a histogram of {sum(heights):,} rows", _figure([trace], layout))


def _in_words(curve: Curve) -> str:
    finite = curve.series.finite
    if not len(finite):
        return f"{curve.label}: no finite value"
    return (
        f"{curve.label}: from {number(float(finite[0]))} to {number(float(finite[-1]))}, "
        f"least {number(float(finite.min()))}, greatest {number(float(finite.max()))}"
    )


def _figure(traces: list[dict[str, Any]], layout: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "figure", "traces": traces, "layout": layout}


def _minutes(windows: Sequence[Window]) -> list[float]:
    """The middle of each window, in minutes of training. Pauses between attempts don't count."""
    ends = np.cumsum([window.wall_s for window in windows])
    return [
        round((float(end) - window.wall_s / 2) / 60, 4) for end, window in zip(ends, windows, strict=True)
    ]  # fmt: skip


def _widths(windows: Sequence[Window]) -> list[float]:
    return [max(window.wall_s / 60, 1e-6) for window in windows]


def _list(values: Iterable[float]) -> list[float | None]:
    return [_value(float(value)) for value in values]


def _value(value: float | None) -> float | None:
    """Return a number for JSON, with seven digits and within `BOUND`; None if it isn't finite."""
    if value is None or not math.isfinite(value):
        return None
    if abs(value) < 1 / BOUND:
        return 0.0
    return float(f"{max(-BOUND, min(BOUND, value)):.7g}")


def _cut(text: str, most: int = 24) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
