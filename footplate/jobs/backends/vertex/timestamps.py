"""Timestamps of Google's services, to the nanosecond."""

from __future__ import annotations

import re
from datetime import UTC, datetime

SECOND = 10**9

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z")


def to_time(text: str) -> int:
    """Convert a timestamp to nanoseconds since 1970; 0 if it isn't one.

    >>> to_time("1970-01-01T00:00:01.5Z")
    1500000000
    """
    match = _TIME.fullmatch(text)
    if match is None:
        return 0
    whole = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
    return int(whole.timestamp()) * SECOND + int((match[2] or "").ljust(9, "0"))


def to_text(at: int) -> str:
    """Convert nanoseconds since 1970 to a timestamp.

    >>> to_text(1500000000)
    '1970-01-01T00:00:01.500000000Z'
    """
    return f"{datetime.fromtimestamp(at // SECOND, UTC):%Y-%m-%dT%H:%M:%S}.{at % SECOND:09d}Z"
