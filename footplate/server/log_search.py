"""Search in the output of a job, within limits of memory and time.

A text is matched after its secrets are hidden. So a search can't find out a secret, not even letter by letter. Colours of a
terminal are removed first, because they may be in the middle of a word.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from footplate.core.errors import Unavailable
from footplate.jobs.redaction import Mask
from footplate.jobs.supervision.follow import Line

# The most lines of an answer, and the most characters of a line.
MOST = 1000
LONGEST = 2000
SEARCH_S = 5.0
_BEFORE = 200
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# A search keeps a processor busy, so only few run at the same time.
_slots = threading.BoundedSemaphore(2)


@dataclass(frozen=True)
class Hit:
    """A line that contains the text. `number` counts the lines of its process in its attempt, from 1."""

    attempt: int
    source: str
    number: int
    text: str


@dataclass(frozen=True)
class Hits:
    """The result of a search.

    Attributes:
        hits: the last lines that contain the text, in order.
        count: the number of all lines that contain it.
        complete: False if the time was over before the end of the output.
    """

    hits: tuple[Hit, ...]
    count: int
    complete: bool


def search(
    lines: Iterable[Line], text: str, mask: Mask, attempt: int | None = None, source: str | None = None,
    limit_s: float = SEARCH_S,
) -> Hits:  # fmt: skip
    """Find the lines that contain a text, in any case of its letters.

    Args:
        lines: the lines of the job.
        text: the text.
        mask: hides secrets.
        attempt: only lines of this attempt; None for all.
        source: only lines of this process; None for all.
        limit_s: the time of the search.

    Raises:
        Unavailable: too many searches run.
    """
    if not _slots.acquire(timeout=limit_s):
        raise Unavailable("too many searches run now. Try again in a few seconds.")
    try:
        return _search(lines, text.casefold(), mask, attempt, source, limit_s)
    finally:
        _slots.release()


def _search(
    lines: Iterable[Line], text: str, mask: Mask, attempt: int | None, source: str | None, limit_s: float
) -> Hits:
    deadline = time.monotonic() + limit_s
    hits: deque[Hit] = deque(maxlen=MOST)
    numbers: dict[tuple[int, str], int] = {}
    count = 0
    for line in lines:
        if time.monotonic() > deadline:
            return Hits(tuple(hits), count, False)
        writer = (line.attempt, line.source)
        numbers[writer] = number = numbers.get(writer, 0) + 1
        if attempt not in (None, line.attempt) or source not in (None, line.source):
            continue
        plain = mask.text(_COLOURS.sub("", line.text).rstrip("\r\n"))
        at = plain.casefold().find(text)
        if at >= 0:
            count += 1
            begin = max(0, at - _BEFORE) if len(plain) > LONGEST else 0
            hits.append(Hit(line.attempt, line.source, number, plain[begin : begin + LONGEST]))
    return Hits(tuple(hits), count, True)
