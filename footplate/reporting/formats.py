"""Numbers, durations and times as a reader of a report wants them."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

from footplate.hardware.machine import readable_size

NOTHING = "–"


def number(value: Any, digits: int = 5) -> str:
    """Format a number: whole numbers whole, others with some digits. Anything else is its text."""
    if value is None:
        return NOTHING
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.{digits}g}" if 1e-4 <= abs(value) < 1e15 else f"{value:.{digits - 1}e}"


def share(value: float | None) -> str:
    """Format a share as a percentage."""
    return NOTHING if value is None else f"{value:.1%}"


def duration(seconds: float | None) -> str:
    """Format seconds: "3.5 ms", "0.41 s", "12.3 s", "4 min 10 s", "3 h 5 min".

    >>> duration(250)
    '4 min 10 s'
    """
    if seconds is None:
        return NOTHING
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600):,} h {int(seconds % 3600 // 60)} min"


def moment(seconds: float | None) -> str:
    """Format seconds since 1970 in local time, with the zone."""
    if not seconds:
        return NOTHING
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    except (OverflowError, OSError, ValueError):
        return NOTHING


def decimal_size(nbytes: float) -> str:
    """Format a number of bytes with the decimal prefixes of an axis: "420 MB"."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"


def size(nbytes: float | None) -> str:
    """Format a number of bytes."""
    return NOTHING if nbytes is None else readable_size(int(nbytes))


def count(n: int, noun: str) -> str:
    """Format a number of things.

    >>> count(1, "step"), count(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
