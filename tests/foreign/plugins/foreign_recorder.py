"""A pytest plugin for the inner run: records the outcome of each phase of each case, and runs only the wanted cases.

A suite's plugin that replaces a class calls `counts_use_of(cls)`. In place of a function it puts
`counts_calls_of(function)`. A case that passes without such an object or call proves nothing about Footplate; its outcome
is "unused". After a case that timed out, the processes that it has started are killed.
"""

from __future__ import annotations

import functools
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_processes
import pytest

_RESULTS = Path(os.environ["FOREIGN_RESULTS"])
# The folder of the test files, relative to the root. It is cut from the names of cases.
_TESTS = os.environ["FOREIGN_TESTS"]
_WANTED = os.environ.get("FOREIGN_WANTED", "")


_MARK = os.environ[foreign_processes.MARK]
_uses: dict[Callable[..., object], int] = {}
# Processes that earlier cases have started.
_before: set[int] = set()


def counts_use_of(cls: type) -> None:
    """Count the objects of a class that each case makes."""
    made_before = cls.__init__
    _uses[cls] = 0

    @functools.wraps(made_before)
    def __init__(self, *args, **kwargs):
        _uses[cls] += 1
        made_before(self, *args, **kwargs)

    cls.__init__ = __init__


def counts_calls_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to count its calls."""
    _uses[function] = 0

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _uses[function] += 1
        return function(*args, **kwargs)

    return counted


class LeftByKeyboardInterrupt(Exception):
    """A KeyboardInterrupt that a test didn't catch. Pytest itself would end the session."""


def _case(nodeid: str) -> str:
    return nodeid.removeprefix(_TESTS + "/")


def _record(**record: object) -> None:
    with _RESULTS.open("a") as file:
        file.write(json.dumps({**record, "at": time.time()}) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flaky: of pytest-rerunfailures")
    config.addinivalue_line("markers", "forked: of pytest-forked")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _WANTED:
        return
    wanted = set(Path(_WANTED).read_text().splitlines())

    def asked(case: str) -> bool:
        return case in wanted or case.split("[", 1)[0] + "[*]" in wanted

    items[:] = [item for item in items if asked(_case(item.nodeid))]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _uses.update(dict.fromkeys(_uses, 0))
    _before.clear()
    _before.update(foreign_processes.marked(_MARK))
    _record(case=_case(item.nodeid), when="begin", outcome="failed", seconds=0.0, error="", line="")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    outcome = yield
    report = outcome.get_result()
    result, error = report.outcome, ""
    if call.excinfo is not None:
        error = f"{call.excinfo.typename}: {call.excinfo.value}"[:600]
    if report.when == "call" and result == "skipped" and hasattr(report, "wasxfail"):
        result = "passed"
    if report.when == "call" and result == "passed" and _uses and not any(_uses.values()):
        result, error = "unused", "used nothing of " + ", ".join(sorted({used.__module__ for used in _uses}))
    if report.when == "call" or result != "passed":
        _record(
            case=_case(item.nodeid),
            when=report.when,
            outcome=result,
            seconds=round(call.duration, 2),
            error=error,
            line=_lines(call.excinfo, item.path) if call.excinfo else "",
        )
    # The beginning of pytest-timeout's message.
    if "Timeout (>" in error:
        foreign_processes.end(_MARK, spared=_before)


def _lines(excinfo: pytest.ExceptionInfo, test_file: Path) -> str:
    """The last line of the test that ran, and the line that raised the exception."""
    frames = traceback.extract_tb(excinfo.tb)
    of_test = [frame for frame in frames if frame.filename == str(test_file)]
    shown = [*of_test[-1:], *frames[-1:]]
    return " | ".join(f"{'/'.join(Path(each.filename).parts[-3:])}:{each.lineno}: {each.line}" for each in shown)[-500:]


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    outcome = yield
    if outcome.excinfo is not None and issubclass(outcome.excinfo[0], KeyboardInterrupt):
        error = LeftByKeyboardInterrupt(str(outcome.excinfo[1]))
        error.__cause__ = outcome.excinfo[1]
        outcome.force_exception(error.with_traceback(outcome.excinfo[2]))
