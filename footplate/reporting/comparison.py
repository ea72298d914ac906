"""Several runs side by side: their heads, the hyper-parameters that differ, and their final metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from footplate.reporting.formats import NOTHING, number
from footplate.reporting.html import Html, paragraph, section, table, tag
from footplate.reporting.run_record import RunRecord
from footplate.reporting.sections_record import value_text
from footplate.reporting.sections_training import LEARNING_RATE, OF_MONITOR, head_facts


def distinct_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Name each run by the end of its path that no other run has."""
    paths = [run.directory.resolve() for run in runs]
    longest = max(len(path.parts) for path in paths)
    for length in range(1, longest + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    return [replace(run, name=f"{run.name} ({number})") for number, run in enumerate(runs, 1)]


def heads_section(runs: Sequence[RunRecord]) -> Html:
    """Draw the facts of all runs, a column for each."""
    facts = [dict(head_facts(run)) for run in runs]
    names = [name for name in facts[0] if any(of_run[name] for of_run in facts)]
    status = ("status", *(tag("span", run.status, class_=f"badge {run.status}") for run in runs))
    rows: list[tuple[Any, ...]] = [status]
    rows += [(name, *(of_run[name] or NOTHING for of_run in facts)) for name in names]
    return section("head", "Runs", table(("", *(run.name for run in runs)), rows, numbers=False))


def differences_section(runs: Sequence[RunRecord]) -> Html:
    """Draw the hyper-parameters that differ."""
    names = list(dict.fromkeys(name for run in runs for name in run.hparams))
    rows = [
        (name, *(value_text(run.hparams[name]) if name in run.hparams else NOTHING for run in runs))
        for name in names
        if len({repr(run.hparams.get(name)) for run in runs}) > 1
    ]
    title = "Hyper-parameters that differ"
    if not rows:
        same = (
            f"All {len(names):,} hyper-parameters are the same." if names else "No run has recorded hyper-parameters."
        )
        return section("differences", title, paragraph(same, note=True))
    note = f"{len(names) - len(rows):,} more are the same."
    grid = table(("name", *(run.name for run in runs)), rows, numbers=False)
    return section("differences", title, grid, paragraph(note, note=True))


def metric_names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the metrics that models have logged."""
    return [
        name
        for name in dict.fromkeys(name for run in runs for name in run.metrics.series)
        if not name.startswith((LEARNING_RATE, OF_MONITOR))
    ]


def final_metrics_section(runs: Sequence[RunRecord]) -> Html:
    """Draw the last value of each metric, with the least and the greatest one."""
    names = metric_names(runs)
    if not names:
        return section("final", "Final metrics", paragraph("No run has recorded a metric.", note=True))
    rows = [(name, *(_last(run, name) for run in runs)) for name in names]
    return section(
        "final", "Final metrics", table(("metric", *(run.name for run in runs)), rows),
        paragraph("The last value of each metric. In brackets: its least and its greatest value.", note=True),
    )  # fmt: skip


def _last(run: RunRecord, name: str) -> str:
    series = run.metrics.series.get(name)
    if series is None:
        return NOTHING
    finite = series.finite
    ends = f" ({number(float(finite.min()), 4)} … {number(float(finite.max()), 4)})" if len(finite) > 1 else ""
    return f"{number(series.last)}{ends}"
