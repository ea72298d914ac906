"""Times as Google's services write them, to the nanosecond."""

from __future__ import annotations

import re
from datetime import UTC, datetime

SECOND = 10**9

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z")


def to_time(text: str) -> int:
    """Nanoseconds since 1970; 0 of what is no time.

    >>> to_time("1970-01-01T00:00:01.5Z")
    1500000000
    """
    found = _TIME.fullmatch(text)
    if found is None:
        return 0
    whole = datetime.fromisoformat(found[1]).replace(tzinfo=UTC)
    return int(whole.timestamp()) * SECOND + int((found[2] or "").ljust(9, "0"))


def to_text(at: int) -> str:
    """As the services take it.

    >>> to_text(1500000000)
    '1970-01-01T00:00:01.500000000Z'
    """
    return f"{datetime.fromtimestamp(at // SECOND, UTC):%Y-%m-%dT%H:%M:%S}.{at % SECOND:09d}Z"
