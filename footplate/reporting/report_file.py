"""The file of a report, which a notebook shows as a link with the state and the last metrics of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PosixPath

from footplate.core import html
from footplate.reporting.comparison import distinct_names, metric_names
from footplate.reporting.formats import number
from footplate.reporting.run_record import RunRecord
from footplate.reporting.sections_training import head_facts

FACTS = ("started", "wall time", "steps", "complete epochs")


class ReportFile(PosixPath):
    """The path of a report. A path that is made of it, such as its parent, is shown as a link only."""

    _summary = ""

    @classmethod
    def of(cls, path: Path, runs: Sequence[RunRecord]) -> ReportFile:
        """Make the path of a report.

        Args:
            path: the file.
            runs: the runs of the report.
        """
        file = cls(path)
        file._summary = summary_table(runs)
        return file

    def _repr_html_(self) -> str:
        return html.card("Report", html.link(self), self._summary)


def summary_table(runs: Sequence[RunRecord]) -> str:
    """Describe runs in HTML, a column for each: state, times, steps, and the last value of each metric."""
    runs = distinct_names(runs)
    facts = [dict(head_facts(run)) for run in runs]
    rows = [["status", *(run.status for run in runs)]]
    rows += [
        [name, *(of_run[name] or "" for of_run in facts)] for name in FACTS if any(of_run[name] for of_run in facts)
    ]
    for name in metric_names(runs):
        series = [run.metrics.series.get(name) for run in runs]
        rows.append([name, *("" if each is None else number(each.last) for each in series)])
    return html.grid(["", *(run.name for run in runs)], rows)
