"""The first program of a replica on Vertex AI, as it is sent: one file of the standard library, for Python 3.7 too."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from footplate.jobs.backends.vertex.distributions import SCRIPT, distributions
from footplate.jobs.package import snapshot

TRIAL = {"CLOUD_ML_TRIAL_ID": "7", "FOOTPLATE_TRIAL_METRIC": "accuracy", "FOOTPLATE_TRIAL_TUNING": "tuned-1"}

# Reports a value, and another one when it is asked to end.
REPORTS = """
import json, os, signal, sys, time
def report(step):
    with open(os.environ["FOOTPLATE_TRIAL_REPORTS"], "a") as file:
        file.write(json.dumps({"step": step, "value": 0.5}) + chr(10))
def end(*_):
    report(2)
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
print(json.loads(os.environ["TF_CONFIG"])["task"]["trial"], flush=True)
report(1)
time.sleep(60)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    package = tmp_path / "source" / "trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    *_, last = distributions(snapshot(package, (), tmp_path / "snapshots"))
    assert last.name == SCRIPT
    path = tmp_path / SCRIPT
    path.write_bytes(last.content)
    return path


def start(script: Path, program: str, spec: Any = None, **variables: str) -> subprocess.Popen[str]:
    (script.parent / "program.py").write_text(program)
    described = json.dumps(spec or {"task": {"type": "workerpool0", "index": 0}})
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.Popen(
        [sys.executable, "-I", "-c", f"import runpy, sys; sys.path.insert(0, {str(script.parent)!r}); "
         f"sys.argv = ['launch', 'program']; runpy.run_path({str(script)!r}, run_name='__main__')"],
        stdout=subprocess.PIPE, text=True, cwd=script.parent,
        env={**environment, "CLUSTER_SPEC": described, **variables},
    )  # fmt: skip


def test_it_needs_the_standard_library_only_and_no_new_syntax(script: Path):
    tree = ast.parse(script.read_text(), feature_version=(3, 7))
    names = {
        name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names)


def test_reports_of_a_trial_are_lines_of_its_output_and_a_signal_reaches_its_program(script: Path):
    process = start(script, REPORTS, **TRIAL)
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert [*lines, rest] == [
        "7\n",
        'footplate-trial reports {"step": 1, "value": 0.5}\n',
        'footplate-trial reports {"step": 2, "value": 0.5}\n',
    ]
    assert process.returncode == 3


def test_a_trial_that_was_killed_ends_as_a_shell_would_say_it(script: Path):
    process = start(script, "import os; os.kill(os.getpid(), 9)", **TRIAL)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("trial", [{}, TRIAL], ids=["a training", "a trial's worker"])
def test_another_replica_becomes_its_program_and_reports_nothing(script: Path, trial: dict[str, str]):
    spec = {"task": {"type": "workerpool1", "index": 0}}
    process = start(script, "import os; print(os.getpid(), os.environ.get('FOOTPLATE_TRIAL_METRIC'))", spec, **trial)
    out, _ = process.communicate(timeout=60)
    assert out == f"{process.pid} None\n"
