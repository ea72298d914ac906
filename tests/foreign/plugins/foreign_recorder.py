"""A pytest plugin for the inner run: records the outcome of each case, and runs only the cases that are asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

_RESULTS = Path(os.environ["FOREIGN_RESULTS"])
_TESTS = os.environ["FOREIGN_TESTS"]  # where the test files lie, relative to the root: cut from the names of cases
_WANTED = os.environ.get("FOREIGN_WANTED", "")


class LeftByKeyboardInterrupt(Exception):
    """A KeyboardInterrupt that a test let through; pytest itself would end the session."""


def _case(nodeid: str) -> str:
    return nodeid.removeprefix(_TESTS + "/")


def _record(**record: object) -> None:
    with _RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")


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


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        expected = hasattr(report, "wasxfail")
        _record(
            case=_case(item.nodeid),
            when=report.when,
            outcome="passed" if expected and report.outcome == "skipped" else report.outcome,
            seconds=round(call.duration, 2),
            error=f"{call.excinfo.typename}: {call.excinfo.value}"[:600] if call.excinfo else "",
            line=str(call.excinfo.traceback[-1])[-300:] if call.excinfo else "",
        )


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    outcome = yield
    if outcome.excinfo is not None and issubclass(outcome.excinfo[0], KeyboardInterrupt):
        error = LeftByKeyboardInterrupt(str(outcome.excinfo[1]))
        error.__cause__ = outcome.excinfo[1]
        outcome.force_exception(error.with_traceback(outcome.excinfo[2]))
