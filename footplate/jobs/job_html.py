"""A job, a list of jobs, and the trials of a tuning, in a notebook.

The metrics of a job are the last values in the newest `metrics.csv` below its job directory. Of a large file, only the
header and the end are read.
"""

from __future__ import annotations

import csv
from datetime import datetime
from itertools import islice
from pathlib import Path

from footplate.core import html
from footplate.jobs.goodput import runs_of
from footplate.jobs.record import Job
from footplate.jobs.run_files import files_below
from footplate.jobs.store.jobs import Summary
from footplate.jobs.tuning.results import Tuning, summary, trial_table

METRICS = "metrics.csv"
NEWEST = 20
TRIALS = 50

_FILES = 8
_END_BYTES = 64 * 1024


def job_html(job: Job) -> str:
    """Describe a job in HTML."""
    values = {
        "state": job.state,
        "cause": job.cause,
        "attempt": job.attempt,
        "submitted": _time(job.created),
        "started": _time(job.started),
        "ended": _time(job.ended),
        "backend": job.backend,
        "job directory": job.plan.get("job_dir"),
    }
    metrics = last_metrics(job)
    latest = html.grid(["metric", "last value"], metrics.items()) if metrics else ""
    return html.card(f"Job {job.name}", html.facts(values), latest)


def list_html(jobs: list[Summary], count: int) -> str:
    """Describe jobs in HTML.

    Args:
        jobs: the newest jobs.
        count: the number of all jobs.
    """
    header = ["job", "state", "attempt", "submitted", "cause"]
    rows = [[job.name, job.state, job.attempt, _time(job.created), job.cause] for job in jobs]
    left_out = count - len(jobs)
    return html.card(
        "Jobs", html.grid(header, rows), html.notes([f"… and {left_out:,} older jobs"] if left_out else [])
    )


def tuning_html(tuning: Tuning) -> str:
    """Describe the trials of a tuning in HTML, the best first."""
    output = tuning.to_dict()
    columns, rows = trial_table(output)
    lines = [[row[key] for key in columns] for row in rows[:TRIALS]]
    left_out = len(rows) - len(lines)
    return html.card(
        f"Tuning {tuning.job.name}",
        # With a best trial, the cause says the same as the summary.
        html.facts({"state": tuning.job.state, "cause": None if tuning.best else tuning.job.cause}),
        html.grid(list(columns.values()), lines) if lines else "",
        html.notes([*([f"… and {left_out:,} more trials"] if left_out else []), summary(output)]),
    )


def last_metrics(job: Job) -> dict[str, str]:
    """Read the last value of each metric of a job, by name. Empty if the job has none on this machine."""
    root, _ = runs_of(job)
    files = [] if root is None else list(islice(files_below(root, METRICS, job.created), _FILES))
    if not files:
        return {}
    newest = max(files, key=lambda path: path.stat().st_mtime)
    header, rows = _header_and_last_rows(newest)
    values = {name: cell for row in rows for name, cell in zip(header, row, strict=False) if name and cell}
    return {name: _shortened(cell) for name, cell in values.items()}


def _header_and_last_rows(path: Path) -> tuple[list[str], list[list[str]]]:
    with path.open("rb") as file:
        header = file.readline()
        start = max(len(header), path.stat().st_size - _END_BYTES)
        file.seek(start)
        lines = file.read().decode(errors="replace").split("\n")
    # The first line may begin in the middle of a row. The last one has no end yet, if a program writes it now.
    whole = lines[1 if start > len(header) else 0 : -1]
    return next(csv.reader([header.decode(errors="replace").strip()])), list(csv.reader(whole))


def _shortened(cell: str) -> str:
    try:
        return f"{float(cell):.6g}"
    except ValueError:
        return cell


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
