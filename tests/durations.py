"""Seconds of each test: recorded in durations.json by `make record`, read by `make fast` and `scheduling.py`.

`make fast` leaves out the tests that took more than a second when they were last recorded, and those marked `slow` or
`engine`. A new test is fast until it is recorded.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "durations.json"
SLOW_S = 1.0


@cache
def recorded() -> dict[str, float]:
    """Seconds by node id, of the tests that took more than a second in the last recording."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


class Recorder:
    """Adds up the seconds of each test, and replaces the records of the tests that ran."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test's setup, call or teardown."""
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        kept = {test: seconds for test, seconds in recorded().items() if test not in self._seconds}
        slow = {test: round(seconds, 1) for test, seconds in self._seconds.items() if seconds > SLOW_S}
        FILE.write_text(json.dumps(dict(sorted({**kept, **slow}.items())), indent=0, ensure_ascii=False) + "\n")


def only_fast(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that aren't fast."""
    slow = recorded()
    fast = [item for item in items if item.nodeid not in slow and not {"slow", "engine"} & set(item.keywords)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(fast)])
    items[:] = fast
