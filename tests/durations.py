"""How long tests take: recorded in durations.json by `make durations`, and read to mark the slow ones.

A test that took more than a second when it was last recorded is `slow`, as is one that is marked so by hand. `make fast`
runs the others. A new test is fast until it is recorded.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "durations.json"
SLOW_S = 1.0


def recorded() -> dict[str, float]:
    """The slow tests of the last recording, by their node ids, with their seconds."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


class Recorder:
    """Adds up the seconds of each test, and puts those of slow ones into the file in the place of what stood there."""

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


def mark_slow(items: list[pytest.Item]) -> None:
    """Mark the tests that were slow when they were last recorded, and put the files that took longest first.

    Two processes that take a file at a time end at about the same time, then.
    """
    slow = recorded()
    of_file: Counter[str] = Counter()
    for test, seconds in slow.items():
        of_file[_file(test)] += seconds
    items.sort(key=lambda item: -of_file[_file(item.nodeid)])
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")


def _file(test: str) -> str:
    return test.split("::", 1)[0]
