"""Sections about the training: its head, its curves, its learning rate, and its attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from footplate.reporting.charts import DASHES, Chart, Curve, curves_chart
from footplate.reporting.formats import count, duration, moment, number
from footplate.reporting.html import Html, facts, folded, paragraph, section, table, tag
from footplate.reporting.monitor_log import Attempt, MonitorLog
from footplate.reporting.run_record import STATUSES, RunRecord

STAGES = ("train_", "val_", "valid_", "validation_", "test_", "train/", "val/", "valid/", "validation/", "test/")
LEARNING_RATE = "lr-"
OF_MONITOR = "monitor/"


def head_section(run: RunRecord) -> Html:
    """Draw the status, and the facts that tell a run from others."""
    badge = tag("span", run.status, class_=f"badge {run.status}")
    return section(
        "head", "Run", paragraph(badge, " ", STATUSES[run.status]),
        facts([("directory", str(run.directory)), *head_facts(run)]),
    )  # fmt: skip


def head_facts(run: RunRecord) -> list[tuple[str, str | None]]:
    """Return the facts of a run, by name. A fact that isn't known is None."""
    attempts, environment = run.monitor.attempts, run.environment
    meta = run.checkpoint.meta if run.checkpoint is not None else {}
    last = run.monitor.last
    began = attempts[0].start.time if attempts else environment.get("recorded")
    git = environment.get("git")
    commit = (
        f"{git.get('commit')}{', with changes' if git.get('changed') else ''}" if isinstance(git, Mapping) else None
    )
    trained_s = sum(window.wall_s for window in run.monitor.windows)
    device = run.hparams.get("trainer/accelerator") if last is None else last.start.device
    precision = run.hparams.get("trainer/precision") if last is None else last.start.precision
    return [
        ("started", moment(began) if isinstance(began, (int, float)) else None),
        ("last sign", moment(last.ended) if last else None),
        ("wall time", duration(last.ended - attempts[0].start.time) if last else None),
        ("time of training", duration(trained_s) if trained_s else None),
        ("steps", f"{steps_of(run):,}" if steps_of(run) is not None else None),
        ("complete epochs", None if epochs_of(run) is None else number(epochs_of(run))),
        ("last checkpoint", moment(meta["created"]) if meta.get("created") else None),
        ("attempts", number(len(attempts)) if len(attempts) > 1 else None),
        ("devices", None if device is None else f"{last.start.world_size} × {device}" if last else str(device)),
        ("precision", None if precision is None else str(precision)),
        ("model", str(meta["module"]) if meta.get("module") else None),
        ("Footplate", _text(environment.get("footplate") or meta.get("footplate"))),
        ("torch", _text(_packages(run).get("torch") or meta.get("torch"))),
        ("Python", _text(environment.get("python"))),
        ("git commit", commit),
    ]


def steps_of(run: RunRecord) -> int | None:
    """Return the optimizer steps of a run; None if it has made none."""
    known = [attempt.step for attempt in run.monitor.attempts[-1:]]
    known += [int(series.steps.max()) for series in run.metrics.series.values() if len(series.steps)]
    if run.checkpoint is not None:
        known.append(run.checkpoint.global_step)
    return max(known, default=None)


def epochs_of(run: RunRecord) -> int | None:
    """Return the complete epochs at the newest checkpoint; None without a checkpoint."""
    progress = run.state.get("progress", {})
    epoch = progress.get("epoch")
    return epoch + bool(progress.get("epoch_ended")) if isinstance(epoch, int) else None


def curves_section(runs: Sequence[RunRecord]) -> Html:
    """Draw all metrics. Metrics that differ only in their stage share a chart, and so do the runs."""
    faults = [
        f"{_of(run, runs)}{count(run.metrics.faulty, 'line')} of {run.metrics.file.name} could not be read and "
        f"{'is' if run.metrics.faulty == 1 else 'are'} left out."
        for run in runs
        if run.metrics.faulty and run.metrics.file is not None
    ]
    notes = [paragraph(fault, note=True) for fault in faults]
    charts = [chart for title, chart in metric_charts(runs) if not title.startswith(OF_MONITOR)]
    of_monitor = [chart for title, chart in metric_charts(runs) if title.startswith(OF_MONITOR)]
    if not charts and not of_monitor:
        absent = "No metric is recorded. Call self.log(…) in a step, and keep a file logger: Trainer(logger=fp.CSV())."
        return section("metrics", "Metrics", paragraph(absent, note=True), *notes)
    more = folded(f"{count(len(of_monitor), 'metric')} of the monitor", _grid(of_monitor)) if of_monitor else ""
    return section("metrics", "Metrics", _controls(), _grid(charts), more, *notes, _final_table(runs))


def learning_rate_section(runs: Sequence[RunRecord]) -> Html:
    """Draw the learning rates."""
    curves = [
        Curve(series, _label(name, run, runs), index + 5 * number_of_rate, times=training_minutes(run, series.steps))
        for index, run in enumerate(runs)
        for number_of_rate, (name, series) in enumerate(
            (name, series) for name, series in run.metrics.series.items() if name.startswith(LEARNING_RATE)
        )
    ]
    title = "Learning rate"
    if not curves:
        absent = "The learning rate isn't recorded. Add fp.LearningRateMonitor() to the callbacks."
        return section("learning-rate", title, paragraph(absent, note=True))
    return section("learning-rate", title, _grid([curves_chart("learning rate by step", curves)]))


def metric_charts(runs: Sequence[RunRecord]) -> list[tuple[str, Chart]]:
    """Make a chart for each metric without its stage, losses first."""
    groups: dict[str, list[Curve]] = {}
    for index, run in enumerate(runs):
        for name, series in run.metrics.series.items():
            if name.startswith(LEARNING_RATE):
                continue
            title, stage = without_stage(name)
            # Of one run, stages differ in colour; of several runs, the runs do.
            colour = index if len(runs) > 1 else list(DASHES).index(stage)
            dash = DASHES[stage] if len(runs) > 1 else "solid"
            curve = Curve(series, _label(name, run, runs), colour, dash, training_minutes(run, series.steps))
            groups.setdefault(title, []).append(curve)
    order = sorted(groups, key=lambda title: ("loss" not in title.lower(), len(groups[title]) == 1, title))
    return [(title, curves_chart(title, groups[title])) for title in order]


def without_stage(name: str) -> tuple[str, str]:
    """Return a metric's name without its stage, and the stage.

    >>> without_stage("val_loss"), without_stage("accuracy")
    (('loss', 'val'), ('accuracy', 'train'))
    """
    for prefix in STAGES:
        if name.startswith(prefix) and len(name) > len(prefix):
            stage = prefix[:-1]
            return name.removeprefix(prefix), stage if stage in DASHES else "val"
    return name, "train"


def training_minutes(run: RunRecord, steps: np.ndarray) -> np.ndarray | None:
    """Return the minutes of training at each step, from the windows of the monitor; None without any.

    Steps that were lost and made again count with the time of the last attempt that made them.
    """
    known: list[tuple[float, float]] = [(0.0, 0.0)]
    trained_s = 0.0
    for window in run.monitor.windows:
        trained_s += window.wall_s
        while known and known[-1][0] >= window.step:
            known.pop()
        known.append((window.step, trained_s / 60))
    if len(known) < 2:
        return None
    at, minutes = np.array(known).T
    return np.interp(steps, at, minutes)


def attempts_section(monitor: MonitorLog, hangs: Sequence[tuple[str, str]]) -> Html:
    """Draw the attempts of a run, and its hangs."""
    parts: list[Html] = []
    if len(monitor.attempts) > 1:
        parts.append(table(("attempt", "started", "from step", "to step", "devices", "set-up", "end"), _rows(monitor)))
        again = monitor.steps_trained_again
        lost = f"{count(again, 'step')} had to be trained again." if again else "No step had to be trained again."
        parts.append(paragraph(lost))
    elif monitor.attempts:
        parts.append(paragraph("The run was never started again.", note=True))
    else:
        parts.append(paragraph("Attempts aren't recorded: the run has no monitor.jsonl.", note=True))
    if not hangs:
        parts.append(paragraph("No launch has found a hang.", note=True))
    for name, text in hangs:
        sentence, _, stacks = text.partition("\n")
        parts.append(folded(f"{name}: {sentence}", tag("pre", stacks.strip("\n"), tabindex="0")))
    return section("attempts", "Restarts and hangs", *parts)


def _rows(monitor: MonitorLog) -> list[tuple[str, ...]]:
    def end_of(attempt: Attempt) -> str:
        return attempt.status or "no end recorded"

    return [
        (
            str(index + 1),
            moment(attempt.start.time),
            f"{attempt.start.step:,}",
            f"{attempt.step:,}",
            f"{attempt.start.world_size} × {attempt.start.device}",
            duration(attempt.start.setup_s),
            end_of(attempt),
        )
        for index, attempt in enumerate(monitor.attempts)
    ]


def _final_table(runs: Sequence[RunRecord]) -> Html:
    rows = [
        (
            _label(name, run, runs), number(series.last), number(_least(series.finite)), number(_greatest(series.finite)),
            f"{len(series.values):,}",
        )
        for run in runs
        for name, series in run.metrics.series.items()
        if not name.startswith(OF_MONITOR)
    ]  # fmt: skip
    return folded("Last, least and greatest values", table(("metric", "last", "least", "greatest", "values"), rows))


def _least(values: np.ndarray) -> float | None:
    return float(values.min()) if len(values) else None


def _greatest(values: np.ndarray) -> float | None:
    return float(values.max()) if len(values) else None


def _controls() -> Html:
    """Make the controls of all curves. The page's script shows them."""
    smoothing = tag(
        "label", "Smoothing ", tag("input", type="range", min="0", max="0.99", step="0.01", value="0", id="smoothing"),
        tag("output", "0", for_="smoothing", id="smoothing-value"),
    )  # fmt: skip
    log = tag("label", tag("input", type="checkbox", id="log-axis"), " Logarithmic axis")
    axis = tag(
        "label", "Horizontal axis ",
        tag("select", tag("option", "step", value="step"), tag("option", "minutes", value="time"), id="x-axis"),
    )  # fmt: skip
    hint = tag("span", "Drag in a chart to zoom, double-click to see all.", class_="note hint")
    return tag("div", smoothing, log, axis, hint, class_="controls", hidden=True)


def _grid(charts: Sequence[Chart]) -> Html:
    return tag("div", *(chart.draw() for chart in charts), class_="charts")


def _label(name: str, run: RunRecord, runs: Sequence[RunRecord]) -> str:
    return name if len(runs) == 1 else f"{run.name} {name}"


def _of(run: RunRecord, runs: Sequence[RunRecord]) -> str:
    return "" if len(runs) == 1 else f"{run.name}: "


def _packages(run: RunRecord) -> Mapping[str, object]:
    packages = run.environment.get("packages")
    return packages if isinstance(packages, Mapping) else {}


def _text(value: object) -> str | None:
    return None if value in (None, "") else str(value)
