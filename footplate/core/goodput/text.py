"""A ledger as lines of text for a terminal."""

from __future__ import annotations

from footplate.core.goodput.causes import NOT_DUE, Cause
from footplate.core.goodput.result import Ledger

BAR = 24


def lines_of(result: Ledger, attempts: bool = True) -> list[str]:
    """Write a ledger as lines: a sentence, the causes with time, share and money, then what each attempt did.

    Args:
        result: the ledger.
        attempts: write the attempts, if there are several.
    """
    lines = [summary(result), ""]
    has_price = result.usd_per_hour is not None
    largest = max((entry.share for entry in result.entries), default=0.0)
    for entry in result.entries:
        bar = "█" * round(BAR * entry.share / largest) if largest else ""
        money = f"{money_of(entry.usd):>10}" if has_price else ""
        lines.append(f"  {entry.label:<28}{time_of(entry.seconds):>11}{entry.share:>8.1%}{money}  {bar}".rstrip())
    total = f"{money_of(result.usd):>10}" if has_price else ""
    lines.append(f"  {'all':<28}{time_of(result.wall_s):>11}{1:>8.1%}{total}")
    lines += [f"  {sentence}" for sentence in sentences(result)]
    if attempts and len(result.attempts) > 1:
        lines += ["", *_attempts(result)]
    return lines


def summary(result: Ledger) -> str:
    """Write the goodput in a sentence."""
    due = sum(entry.seconds for entry in result.entries if entry.cause not in NOT_DUE)
    so_far = " so far" if result.runs else ""
    if not result.split and due > 0:
        return f"goodput: unknown, since the time of the processes isn't split ({time_of(due)}{so_far})"
    if result.goodput is None:
        return "goodput: nothing was to run yet"
    return f"goodput: {result.goodput:.1%} of {time_of(due)}{so_far} trained steps that count"


def sentences(result: Ledger) -> list[str]:
    """Write what a table of causes doesn't show: lost steps, the basis of the price, and what is missing."""
    said = []
    if result.lost_steps:
        steps = "1 step was" if result.lost_steps == 1 else f"{result.lost_steps:,} steps were"
        money = f", for {money_of(result.usd_lost)}" if result.usd_lost else ""
        said.append(f"{steps} lost with an attempt, and are trained again{money}.")
    if result.usd_per_hour is not None:
        said.append(
            f"Price: {money_of(result.usd_per_hour)} an hour" + (f" ({result.machine})." if result.machine else ".")
        )
    return [*said, *result.notes]


def _attempts(result: Ledger) -> list[str]:
    lines = [f"  {'attempt':<9}{'time':>11}{'goodput':>9}  steps"]
    for each in result.attempts:
        seconds = each.ended - each.began
        share = f"{each.seconds.get(Cause.TRAINING, 0.0) / seconds:.1%}" if seconds > 0 and result.split else ""
        steps = "none reported" if each.last_step is None else f"{each.first_step:,} to {each.last_step:,}"
        lost = f", {round(each.lost_steps):,} lost" if round(each.lost_steps) else ""
        lines.append(f"  {each.attempt:<9}{time_of(seconds):>11}{share:>9}  {steps}{lost}")
    return lines


def time_of(seconds: float) -> str:
    """Format a duration.

    >>> time_of(0.25), time_of(75), time_of(7500), time_of(200000)
    ('0.2 s', '1 min 15 s', '2 h 5 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def money_of(usd: float | None) -> str:
    """Format a price. Small prices keep two digits.

    >>> money_of(12.3456), money_of(0.00123), money_of(0.0), money_of(None)
    ('$12.35', '$0.0012', '$0.00', '')
    """
    if usd is None:
        return ""
    return f"${usd:,.2f}" if usd >= 0.1 or usd < 5e-7 else f"${usd:.2g}" if usd >= 1e-4 else f"${usd:.6f}"
