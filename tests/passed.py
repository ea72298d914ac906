"""Where each test file ran last, and how many of its tests passed: recorded in passed.json, shown in docs/status.md.

`make record` records the whole suite, and `make gpu` the tests that need a GPU. A session replaces the records of the files
that it ran, and keeps all others. So a run on another machine adds to the record.

A file has a record for each kind of hardware. A file with the tests of several engines, such as
tests/launch/test_conformance.py, has a record for each engine. Tests marked `alone` run in a session of their own, and
have a record apart from the others of their file.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "passed.json"
CPU = "CPU"
# Only these tests use a GPU.
ON_GPU = "tests/gpu/"
PACKAGES = ("torch", "lightning", "transformers", "pyspark", "ray", "jax", "mlflow", "optuna")
# Their first parameter is an engine.
SEVERAL_ENGINES = re.compile(r"(tests/launch|tests/jobs/backends)/test_(conformance|questions)\.py::.*\[([a-z]+)")


@dataclass
class Run:
    """The tests of a part of the suite, when it ran last."""

    date: str
    passed: int
    failed: int = 0


@dataclass
class Environment:
    """Hardware and versions, with the parts of the suite that ran there last.

    Attributes:
        hardware: "CPU", or a GPU's name.
        system: such as "Linux x86_64".
        versions: Python's, and those of the installed packages among `PACKAGES`.
        runs: by part: a test file, or the tests of an engine in it, such as "tests/launch/test_conformance.py[ray]".
    """

    hardware: str
    system: str
    versions: dict[str, str]
    runs: dict[str, Run] = field(default_factory=dict)


def recorded(file: Path = FILE) -> list[Environment]:
    """The environments of the record."""
    if not file.exists():
        return []
    return [
        Environment(**{**each, "runs": {part: Run(**run) for part, run in each["runs"].items()}})
        for each in json.loads(file.read_text())
    ]


def part_of(test: str, is_alone: bool) -> str:
    """The part of the suite that a test belongs to, given its node id."""
    engine = SEVERAL_ENGINES.match(test)
    return test.partition("::")[0] + (f"[{engine[3]}]" if engine else "") + (" alone" if is_alone else "")


def merged(old: list[Environment], new: list[Environment]) -> list[Environment]:
    """The record after a session. Its runs replace those of the same parts on the same hardware."""
    environments = [Environment(each.hardware, each.system, each.versions, dict(each.runs)) for each in old]
    for session in new:
        for environment in environments:
            if environment.hardware == session.hardware:
                for part in session.runs:
                    environment.runs.pop(part, None)
        same = (each for each in environments if (each.system, each.versions) == (session.system, session.versions))
        entry = next((each for each in same if each.hardware == session.hardware), None)
        if entry is None:
            environments.append(entry := Environment(session.hardware, session.system, session.versions))
        entry.runs.update(session.runs)
    return [each for each in environments if each.runs]


def write(environments: list[Environment], file: Path = FILE) -> None:
    """Write the record, without files that no longer exist."""
    for each in environments:
        there = (part for part in each.runs if (ROOT / re.split(r"\[| ", part)[0]).exists())
        each.runs = {part: each.runs[part] for part in sorted(there)}
    ordered = sorted(environments, key=lambda each: (each.hardware, each.system, *each.versions.items()))
    # A line for each part.
    text = json.dumps([asdict(each) for each in ordered], indent=0, ensure_ascii=False)
    file.write_text(re.sub(r'\{\n("date": .*),\n("passed": .*),\n("failed": .*)\n\}', r"{\1, \2, \3}", text) + "\n")


class Recorder:
    """Collects the results of a session, and merges them into the record."""

    def __init__(self, file: Path = FILE) -> None:
        self._file = file
        self._outcomes: dict[str, dict[str, str]] = defaultdict(dict)  # by part and by node id

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that passed or failed. A test whose setup or teardown fails has failed."""
        if report.failed or (report.passed and report.when == "call"):
            part = part_of(report.nodeid, "alone" in report.keywords)
            self._outcomes[part][report.nodeid] = report.outcome

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the record, unless the session was interrupted."""
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            write(merged(recorded(self._file), self._session()), self._file)

    def _session(self) -> list[Environment]:
        versions = {"Python": platform.python_version()}
        for name in PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        system = f"{platform.system()} {platform.machine()}"
        today = datetime.date.today().isoformat()
        environments: dict[str, Environment] = {}
        for part, outcomes in self._outcomes.items():
            hardware = torch.cuda.get_device_name() if part.startswith(ON_GPU) else CPU
            environment = environments.setdefault(hardware, Environment(hardware, system, versions))
            results = list(outcomes.values())
            environment.runs[part] = Run(today, results.count("passed"), results.count("failed"))
        return list(environments.values())


def why_not(config: pytest.Config) -> str | None:
    """Why a session with these options can't be recorded: it would leave out some tests of a file."""
    option = config.option
    if option.keyword or option.fast or option.maxfail or option.markexpr not in ("", "alone", "not alone"):
        return "--record-passed records whole files: leave out -k, -x, --fast, and -m other than alone and 'not alone'"
    if any("::" in argument for argument in config.args):
        return "--record-passed records whole files: name a file in place of a test"
    if option.accelerator != "cpu":
        return "--record-passed records the tests of the CPU and of tests/gpu: leave out --accelerator"
    return None
