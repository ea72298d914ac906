"""The files of a study: `scaling.json` with all results, `scaling.md` to read, and `scaling.png`, a chart."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from footplate.core import html
from footplate.core.version import __version__
from footplate.scaling.chart import draw
from footplate.scaling.findings import duration
from footplate.scaling.results import Size, Spread, Study

if TYPE_CHECKING:
    from rich.console import RenderableType


NAME = "scaling"
HEADINGS = (
    "np", "learning rate", "time", "with start-up", "speed-up", "samples/s", "efficiency", "loss", "epochs", "trainings",
)  # fmt: skip
NOTHING = "–"


def write(study: Study) -> None:
    """Write the three files."""
    directory = study.directory
    (directory / f"{NAME}.json").write_text(json.dumps(to_dict(study), indent=2) + "\n", encoding="utf-8")
    (directory / f"{NAME}.md").write_text(to_markdown(study), encoding="utf-8")
    draw(study, directory / f"{NAME}.png")


def to_dict(study: Study) -> dict[str, Any]:
    """Convert a study to plain values."""
    import torch

    from footplate.hardware.machine import cpu_model

    return {
        "setup": asdict(study.setup),
        "reading": study.reading,
        "notes": list(study.notes),
        "sizes": [asdict(size) for size in study.sizes],
        "trainings": [asdict(training) for training in study.trainings],
        "machine": {"cpu": cpu_model(), "cores": study.setup.cores} if study.setup.cores is not None else {},
        "versions": {"footplate": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
    }


def to_markdown(study: Study) -> str:
    """Write the table, the findings and the chart as a page."""
    setup = study.setup
    rows = [HEADINGS, tuple("---" for _ in HEADINGS), *map(row, study.sizes)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    paragraphs = [
        f"# Scaling of {setup.name}",
        describe(study),
        table,
        study.reading,
        *study.notes,
        f"![Time, throughput, efficiency and loss by number of processes]({NAME}.png)",
    ]
    return "\n\n".join(paragraphs) + "\n"


def to_table(study: Study) -> RenderableType:
    """Draw the medians and the findings for a terminal."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(*HEADINGS, box=box.SIMPLE, title=f"Scaling of {study.setup.name}", title_justify="left")
    for size in study.sizes:
        table.add_row(*row(size, quartiles=False))
    lines = [study.reading, *study.notes, f"Files: {study.directory / NAME}.png (the chart), .md, .json"]
    return Group(table, *map(Text, lines))


def to_html(study: Study) -> str:
    """Show the medians and the findings in a notebook."""
    rows = [row(size, quartiles=False) for size in study.sizes]
    sentences = [study.reading, *study.notes, f"The chart is {study.directory / NAME}.png."]
    return html.card(f"Scaling of {study.setup.name}", html.grid(HEADINGS, rows), html.notes(sentences))


def row(size: Size, quartiles: bool = True) -> tuple[str, ...]:
    """Format a size as a row of the table: medians, with quartiles if there are several trainings."""

    def shown(spread: Spread | None, text: Callable[[float], str]) -> str:
        if spread is None:
            return NOTHING
        if not quartiles or spread.low == spread.high:
            return text(spread.median)
        low, high = (text(value).removesuffix(" s") for value in (spread.low, spread.high))
        return f"{text(spread.median)} ({low} to {high})"

    return (
        str(size.np),
        f"× {size.lr_factor:.3g}",
        shown(size.seconds, duration),
        shown(size.wall_s, duration),
        NOTHING if size.speedup is None else f"{size.speedup:.2f}",
        shown(size.samples_per_second, lambda value: f"{value:,.0f}"),
        NOTHING if size.efficiency is None else f"{size.efficiency:.2f}",
        "not finite" if size.diverged == size.done > 0 else shown(size.loss, lambda value: f"{value:.4g}"),
        NOTHING if size.epochs is None else f"{size.epochs:g}",
        "failed" if not size.done else f"{size.done}{', some failed' if size.failures else ''}",
    )


def describe(study: Study) -> str:
    """Describe the settings."""
    setup = study.setup
    own = "the training's own" if setup.lr is None else f"{setup.lr:g}"
    warm_up = f", after a warm-up of {setup.warmup:g} epoch(s)" if setup.warmup else ""
    rule = {"linear": f"n times {own}{warm_up}", "sqrt": f"√n times {own}{warm_up}", "none": own}[setup.lr_rule]
    return (
        f"Each size was trained {setup.repeat} time(s) in turn, in {setup.backend} processes, to the same stopping "
        f"criterion. Learning rate with n processes: {rule}. The table has medians, with quartiles in brackets. The loss "
        f"is `{setup.monitor}`."
    )
