"""Build hook of the site: bar charts of benchmarks, drawn from the files in benchmarks/results.

A comment in a page becomes a chart. On GitHub it isn't seen.

    <!-- chart: step_overhead cpu_us | µs of processor time for a step -->
    <!-- chart: data_images steady small | images a second -->

The first word is the file, and the second the figure of its rows. A third word chooses the rows of a kind. A bar is the
figure of a row, and the line on it goes from the first to the third quartile of its rounds.
"""

from __future__ import annotations

import html
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CHART = re.compile(r"^<!-- chart: (\w+) (\w+)(?: (\w+))? \| (.+) -->$", re.MULTILINE)
OURS = "footplate"

WIDTH, NAMES, VALUES = 720, 250, 90  # of the chart, of the names at its left, of the numbers at its right
ROW, BAR, TOP = 24, 14, 34


@dataclass(frozen=True)
class Bar:
    """A bar, and the quartiles of its rounds."""

    name: str
    value: float
    low: float
    high: float


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Draw the charts of a page."""
    return CHART.sub(lambda found: drawn(found[4], bars(*found.group(1, 2, 3))), markdown)


def bars(file: str, figure: str, kind: str | None) -> list[Bar]:
    """The bars of a chart, in the order of the file.

    Args:
        file: the name of a file of results, without its ending.
        figure: the figure of each row. Rows without it have no bar.
        kind: the kind of the rows; None for all rows.
    """
    found = []
    for row in json.loads((RESULTS / f"{file}.json").read_text())["rows"]:
        if figure in row and (kind is None or row.get("kind") == kind):
            rounds = [each[figure] for each in row["rounds"] if figure in each]
            # One round has no spread.
            low, _, high = statistics.quantiles(rounds, n=4, method="inclusive") if rounds[1:] else rounds * 3
            found.append(Bar(row.get("loader", row["name"]), row[figure], low, high))
    return found


def drawn(title: str, bars: Sequence[Bar]) -> str:
    """A bar chart as SVG, in the colours of the site."""
    scale = (WIDTH - NAMES - VALUES) / max(max(bar.value, bar.high) for bar in bars)
    height = TOP + ROW * len(bars)
    parts = [f'<text x="0" y="18" class="title">{html.escape(title)}</text>']
    for index, bar in enumerate(bars):
        middle = TOP + ROW * index + ROW / 2
        kind = "ours" if bar.name.startswith(OURS) else "other"
        end = NAMES + max(bar.value, bar.high) * scale
        parts += [
            f'<text x="{NAMES - 8}" y="{middle + 4:g}" text-anchor="end">{html.escape(bar.name)}</text>',
            f'<rect x="{NAMES}" y="{middle - BAR / 2:g}" width="{bar.value * scale:.1f}" height="{BAR}" class="{kind}"/>',
            f'<path d="M{NAMES + bar.low * scale:.1f} {middle:g}H{NAMES + bar.high * scale:.1f}"/>',
            f'<text x="{end + 8:.1f}" y="{middle + 4:g}">{shown(bar.value)}</text>',
        ]
    # Without blank lines, so that Markdown leaves it alone.
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img">\n' + "\n".join(parts) + "\n</svg>"


def shown(value: float) -> str:
    """A number with three digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
