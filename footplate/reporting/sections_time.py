"""Sections about time and memory: where the time went, what to change, how fast it was, and the slowest rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from footplate.reporting.charts import (
    CAUSES,
    MOST_WINDOWS,
    Chart,
    ranks_chart,
    rate_chart,
    time_chart,
    total_time_chart,
)
from footplate.reporting.formats import NOTHING, count, decimal_size, duration, number, share
from footplate.reporting.html import Html, paragraph, section, table, tag
from footplate.reporting.monitor_log import Advice, Attempt, MonitorLog, Window, merged, total_seconds
from footplate.reporting.run_record import RunRecord

NO_MONITOR = (
    "The time isn't recorded: there is no monitor.jsonl, in which a training records where its time goes. So this report "
    "has no advice, no throughput and no memory."
)


def time_section(runs: Sequence[RunRecord]) -> Html:
    """Draw the time by cause: the whole time, and over the training if there is one run."""
    measured = [run for run in runs if run.monitor.windows]
    if not measured:
        return section("time", "Time by cause", paragraph(NO_MONITOR, note=True))
    totals = [(run.name, total_seconds(run.monitor.windows)) for run in measured]
    parts: list[Html] = [total_time_chart(totals).draw()]
    if len(runs) == 1:
        parts.append(time_chart(measured[0].monitor.windows).draw())
        parts.append(_totals_table(totals[0][1]))
    else:
        causes = list(dict.fromkeys(cause for _, seconds in totals for cause in seconds))
        rows = [
            (
                _cause(cause),
                *(share(seconds.get(cause, 0.0) / max(sum(seconds.values()), 1e-9)) for _, seconds in totals),
            )
            for cause in causes
        ]
        parts.append(table(("cause", *(name for name, _ in totals)), rows))
    return section("time", "Time by cause", *parts)


def advice_section(monitor: MonitorLog) -> Html:
    """Show the advice of the last attempt."""
    last = monitor.last
    if last is None:
        return section("advice", "Advice", paragraph(NO_MONITOR, note=True))
    if not last.advice:
        absent = (
            "The monitor found nothing to change."
            if last.status
            else "Advice is given at the end of a training, and this attempt has no end yet."
        )
        return section("advice", "Advice", paragraph(absent, note=True))
    return section("advice", "Advice", tag("ul", *map(_item, last.advice), class_="advice"))


def speed_section(runs: Sequence[RunRecord]) -> Html:
    """Draw samples, tokens and operations a second, and the share of the device's peak."""
    measured = [(run, run.monitor.windows) for run in runs if run.monitor.windows]
    if not measured:
        return section("speed", "Throughput", paragraph(NO_MONITOR, note=True))
    charts, rows = [], []
    for title, unit, amount in (
        ("Samples a second", " samples/s", lambda window: window.samples),
        ("Tokens a second", " tokens/s", lambda window: window.tokens),
        ("Floating-point operations a second", "FLOP/s", lambda window: window.flops),
    ):
        known = [(run, _shown(windows)) for run, windows in measured if any(map(amount, windows))]
        if known:
            charts.append(_rates(title, unit, known, amount))
            rows.append((title, *(_with_unit(_mean_rate(windows, amount), unit) for _, windows in measured)))
    peaks = [_mfu(run.monitor) for run, _ in measured]
    if any(peak is not None for peak in peaks):
        rows.append(("Share of the peak rate (MFU)", *map(share, peaks)))
    rows.append(("Garbage collection", *(duration(sum(w.gc_s for w in windows)) for _, windows in measured)))
    rows.append(("Recompilations", *(number(_recompilations(run.monitor)) for run, _ in measured)))
    note = paragraph(
        "The share of the peak rate (MFU) isn't known: it needs the operations of a step and the device's peak rate.",
        note=True,
    )
    return section(
        "speed", "Throughput", _grid(charts), table(("mean over the training", *(run.name for run, _ in measured)), rows),
        "" if any(peak is not None for peak in peaks) else note,
    )  # fmt: skip


def memory_section(runs: Sequence[RunRecord]) -> Html:
    """Draw the memory of the process and of the device."""
    charts: list[Chart] = []
    for title, amount in (
        ("Memory of the process", lambda window: window.memory_bytes),
        ("Memory of the device, peak", lambda window: window.device_memory_bytes),
    ):
        known = [(run, _shown(run.monitor.windows)) for run in runs if any(map(amount, run.monitor.windows))]
        if known:
            series = [(run.name, windows, [amount(window) for window in windows]) for run, windows in known]
            greatest = max(value for _, _, values in series for value in values if value is not None)
            charts.append(rate_chart(f"{title}, at most {decimal_size(greatest)}", "B", series))
    absent = paragraph(
        NO_MONITOR if not any(run.monitor.windows for run in runs) else "No memory is recorded.", note=True
    )
    return section("memory", "Memory", _grid(charts) if charts else absent)


def ranks_section(monitor: MonitorLog) -> Html:
    """Compare the ranks, and name the slowest one."""
    compared = [attempt for attempt in monitor.attempts if attempt.comparisons and attempt.comparisons[-1].ranks]
    if not compared:
        alone = monitor.last is not None and monitor.last.start.world_size == 1
        absent = "The run had one rank." if alone else "The ranks were not compared."
        return section("ranks", "Slowest rank", paragraph(absent, note=True))
    attempt = compared[-1]
    return section("ranks", "Slowest rank", paragraph(slowest(attempt)), _grid([ranks_chart(attempt)]))


def slowest(attempt: Attempt) -> str:
    """Name the rank that worked longest, in how many comparisons, and by how much at the last one."""
    times_of = [
        {rank.rank: rank.own_s for rank in comparison.ranks if rank.own_s is not None}
        for comparison in attempt.comparisons
    ]
    known = [max(times, key=times.__getitem__) for times in times_of if times]
    if not known:
        return "The ranks were compared by their wait for input only."
    rank = max(set(known), key=lambda one: (known.count(one), -one))
    times = times_of[-1]
    text = f"Rank {rank} worked longest in {known.count(rank)} of {count(len(known), 'comparison')}"
    middle = float(np.median(list(times.values()))) if times else 0.0
    if rank not in times or middle <= 0:
        return f"{text}."
    excess = times[rank] / middle - 1
    return f"{text}: {duration(times[rank])}, {excess:.1%} above the median." if excess > 0 else f"{text}."


def mean_samples_per_s(windows: Sequence[Window]) -> float | None:
    """Return the samples of each second of training; None if they aren't known."""
    return _mean_rate(windows, lambda window: window.samples)


def _totals_table(seconds: dict[str, float]) -> Html:
    total_s = sum(seconds.values())
    rows = [(_cause(cause), duration(spent), share(spent / max(total_s, 1e-9))) for cause, spent in seconds.items()]
    return table(("cause", "time", "share"), [*rows, ("sum", duration(total_s), share(1.0))])


def _item(advice: Advice) -> Html:
    gain = (
        f" (up to {advice.gain:.2g} times as fast)" if advice.gain and f"{advice.gain:.2g}" not in advice.text else ""
    )
    return tag("li", advice.text, gain)


def _rates(
    title: str,
    unit: str,
    known: Sequence[tuple[RunRecord, list[Window]]],
    amount: Callable[[Window], float | None],
) -> Chart:
    series = [(run.name, windows, [_rate(window, amount) for window in windows]) for run, windows in known]
    return rate_chart(title, unit, series)


def _rate(window: Window, amount: Callable[[Window], float | None]) -> float | None:
    value = amount(window)
    return None if value is None or window.wall_s <= 0 else value / window.wall_s


def _mean_rate(windows: Sequence[Window], amount: Callable[[Window], float | None]) -> float | None:
    known = [(value, window.wall_s) for window in windows if (value := amount(window)) is not None]
    wall_s = sum(wall for _, wall in known)
    return sum(value for value, _ in known) / wall_s if wall_s > 0 else None


def _mfu(monitor: MonitorLog) -> float | None:
    attempt = monitor.last
    if attempt is None or not attempt.peak_flops:
        return None
    rate = _mean_rate(attempt.windows, lambda window: window.flops)
    return None if rate is None else rate / attempt.peak_flops


def _recompilations(monitor: MonitorLog) -> float:
    """Windows count the recompilations since the start of their attempt, or their own: the greatest count is safe."""
    return sum(
        max((window.recompilations for window in attempt.windows), default=0.0) for attempt in monitor.attempts
    )  # fmt: skip


def _with_unit(value: float | None, unit: str) -> str:
    if value is None:
        return NOTHING
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if unit == "FLOP/s" and value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:,.4g}{unit}" if value < 1000 else f"{value:,.0f}{unit}"


def _shown(windows: Sequence[Window]) -> list[Window]:
    return merged(windows, 2 * MOST_WINDOWS)


def _cause(cause: str) -> str:
    return CAUSES.get(cause, (cause, 0))[0]


def _grid(charts: Sequence[Chart]) -> Html:
    return tag("div", *(chart.draw() for chart in charts), class_="charts")
