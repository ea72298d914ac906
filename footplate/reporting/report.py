"""`fp.report`: runs → one HTML file.

fp.report("runs/flowers")                                    # runs/flowers/report.html
fp.report("runs/flowers", "runs/roses", output="both.html")  # side by side
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from footplate.core.errors import ConfigError, DataError, FootplateError
from footplate.core.version import __version__
from footplate.data.table import Table
from footplate.reporting.comparison import (
    differences_section,
    distinct_names,
    final_metrics_section,
    heads_section,
)
from footplate.reporting.formats import moment
from footplate.reporting.goodput import RunLedger, goodput_section, goodputs_section, ledger_of
from footplate.reporting.html import Html, tag
from footplate.reporting.page import build_page, plotly_script
from footplate.reporting.predictions import find_predictions, interpret, pictures_of, read_predictions
from footplate.reporting.report_file import ReportFile
from footplate.reporting.run_record import RunRecord, read_run
from footplate.reporting.run_tables import tables_of
from footplate.reporting.sections_data import data_section, predictions_section
from footplate.reporting.sections_record import (
    alerts_section,
    command_section,
    environment_section,
    hparams_section,
    plan_section,
)
from footplate.reporting.sections_time import (
    advice_section,
    memory_section,
    ranks_section,
    speed_section,
    time_section,
)
from footplate.reporting.sections_training import (
    attempts_section,
    curves_section,
    head_section,
    learning_rate_section,
)
from footplate.reporting.table_statistics import TableStatistics, statistics_of

NAME = "report.html"


def report(
    *runs: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, data: bool = True
) -> ReportFile:
    """Write a report about a run, or about several runs side by side.

    Args:
        runs: the directories of the runs.
        output: the file to write; by default `report.html` in the directory of a single run.
        data: read the tables of the runs, for their statistics and for pictures of samples.

    Returns:
        The path of the file. A notebook shows it as a link, with the state and the last metrics of the runs.

    Raises:
        ConfigError: no run; a directory that holds none; several runs without `output`, or an `output` that can't be
            written.
        MissingExtra: plotly is not installed.

    Examples:
        >>> fp.report("runs/flowers").name
        'report.html'
    """
    if len(runs) == 0:
        raise ConfigError("report(): expected the directory of a run, or several.")
    if len(runs) > 1 and output is None:
        raise ConfigError(f"report() of {len(runs)} runs: give the file to write as output=…, such as report.html.")
    plotly_script()
    return write_report(
        [read_run(os.fspath(run), data=data) for run in runs],
        Path(runs[0], NAME) if output is None else Path(output),
        data,
    )


def write_report(runs: Sequence[RunRecord], output: Path, data: bool = True) -> ReportFile:
    """Write the report of runs that were read; returns its path.

    Raises:
        ConfigError: the file can't be written.
        MissingExtra: plotly is not installed.
    """
    page = page_of(runs, data)
    draft = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(page, encoding="utf-8", errors="replace")
        draft.replace(output)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"output={str(output)!r} can't be written: {error.strerror or error}.") from error
    return ReportFile.of(output, runs)


def page_of(runs: Sequence[RunRecord], data: bool = True) -> str:
    """Build the page of one run, or of several runs side by side."""
    subtitle = f"Made by Footplate {__version__} on {moment(time.time())}."
    if len(runs) == 1:
        return build_page(runs[0].name, subtitle, sections_of(runs[0], data))
    runs = distinct_names(runs)
    ledgers = [ledger_of(run) for run in runs]
    together = [
        heads_section(runs),
        final_metrics_section(runs),
        differences_section(runs),
        curves_section(runs),
        learning_rate_section(runs),
        *_time_sections(runs),
        goodputs_section([(run.name, ledger) for run, ledger in zip(runs, ledgers, strict=True)]),
    ]
    each = [
        tag(
            "details", tag("summary", run.name), *_with_keys(_own_sections(run, ledger, data), f"run-{number}-"),
            class_="run",
        )
        for number, (run, ledger) in enumerate(zip(runs, ledgers, strict=True), 1)
    ]  # fmt: skip
    return build_page(f"{len(runs)} runs: {', '.join(run.name for run in runs)}", subtitle, together, each)


def sections_of(run: RunRecord, data: bool = True) -> list[Html]:
    """Make all sections of one run."""
    head, *own = head_section(run), *_own_sections(run, ledger_of(run), data)
    return [head, curves_section([run]), learning_rate_section([run]), *_time_sections([run]), *own]


def _time_sections(runs: Sequence[RunRecord]) -> list[Html]:
    """Make the sections about time and memory. Without a monitor, one section says so for all."""
    sections = [time_section(runs)]
    if any(run.monitor.attempts for run in runs):
        advice = [advice_section(runs[0].monitor)] if len(runs) == 1 else []
        sections += [*advice, speed_section(runs), memory_section(runs)]
    return sections


def _own_sections(run: RunRecord, ledger: RunLedger, data: bool) -> list[Html]:
    """Make the sections that each of several runs has for itself."""
    hangs = [(hang.name, hang.text) for hang in run.hangs]
    tables = tables_of(run) if data else []
    measured = [ranks_section(run.monitor)] if run.monitor.attempts else []
    return [
        *measured,
        goodput_section(ledger),
        attempts_section(run.monitor, hangs),
        plan_section(run, ledger.money),
        _predictions(run, dict(tables)),
        *([data_section(_statistics(tables))] if data else []),
        hparams_section(run.hparams),
        environment_section(run),
        alerts_section(run.alerts),
        command_section(run),
    ]


def _statistics(tables: Sequence[tuple[str, Table | str]]) -> list[TableStatistics | tuple[str, str]]:
    """Compute the statistics of tables, each table once."""
    statistics: list[TableStatistics | tuple[str, str]] = []
    seen: set[str] = set()
    for use, table in tables:
        if isinstance(table, str):
            statistics.append((use, table))
            continue
        try:
            if table.fingerprint in seen:
                continue
            seen.add(table.fingerprint)
            statistics.append(statistics_of(use, table))
        except Exception as error:  # a file that is gone, damaged, or not to be reached
            statistics.append((use, f"{type(error).__name__}: {error}"))
    return statistics


def _predictions(run: RunRecord, tables: dict[str, Table | str]) -> Html:
    path = find_predictions(run.directory)
    if path is None:
        return predictions_section(None, None, {})
    try:
        predictions = read_predictions(path)
        result = interpret(predictions)
    except DataError as error:
        return predictions_section(None, None, {}, str(error))
    if result is None:
        return predictions_section(predictions, None, {})

    samples = [*result.worst, *result.best]
    samples += [sample for pair in getattr(result, "pairs", ()) for sample in pair.samples]
    opened = [tables.get(use) for use in ("predict", "test", "val", "train")]
    # Positions mean rows of this table only if it has as many rows as there are predictions.
    fitting = (table for table in opened if isinstance(table, Table) and table.num_rows == predictions.of)
    try:
        pictures = pictures_of(samples, predictions, next(fitting, None))
    except (FootplateError, OSError, ValueError):
        pictures = {}
    return predictions_section(predictions, result, pictures)


def _with_keys(sections: Sequence[Html], prefix: str) -> list[Html]:
    """Give the anchors of sections a prefix, because an anchor must be unique in a page."""
    return [
        Html(
            section.replace('<section id="', f'<section id="{prefix}', 1)
            .replace('aria-labelledby="', f'aria-labelledby="{prefix}', 1)
            .replace('<h2 id="', f'<h2 id="{prefix}', 1)
        )
        for section in sections
    ]
