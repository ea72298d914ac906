"""A variable that other processes see, and the variables that imports read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from footplate.jobs.fork_server.environment import placeholder, reads_of

MARKER = """
import os, subprocess, sys
from pathlib import Path
from footplate.jobs.fork_server.environment import Marker
marker = Marker("NAME")
before = os.environ.get("NAME")
if os.fork() == 0:
    marker.set("my_job-17")
    shown = Path("/proc/self/environ").read_bytes().split(bytes(1))
    print(before, os.environ["NAME"], b"NAME=my_job-17" in shown, b"OTHER=kept" in shown, os.environ["OTHER"])
    child = [sys.executable, "-c", "import os; print(os.environ['NAME'])"]
    sys.stdout.flush()
    subprocess.run(child)
    os._exit(0)
os.wait()
print(b"NAME=my_job-17" in Path("/proc/self/environ").read_bytes())
"""


def run(**variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OTHER": "kept", **variables}
    return subprocess.run([sys.executable, "-c", MARKER], env=environ, capture_output=True, text=True, check=False)


def test_a_fork_shows_its_own_variable_to_other_processes():
    ended = run(NAME=placeholder())
    assert ended.stdout.splitlines() == ["None my_job-17 True True kept", "my_job-17", "False"], ended.stderr


@pytest.mark.parametrize("variables", [{}, {"NAME": "short"}], ids=["missing", "no placeholder"])
def test_a_process_without_the_placeholder_is_told(variables: dict[str, str]):
    assert "NAME can't be found in this process's environment" in run(**variables).stderr


def test_variables_that_are_asked_for_are_known_whether_they_are_set_or_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HERE", "1")
    for name in ("AWAY", "GONE", "NOT"):
        monkeypatch.delenv(name, raising=False)

    def ask() -> None:
        assert os.environ["HERE"] == "1"
        assert os.environ.get("AWAY") is None
        assert os.getenv("GONE", "2") == "2"
        assert "NOT" not in os.environ

    assert reads_of(ask) == {"HERE", "AWAY", "GONE", "NOT"}
    assert os.environ["HERE"] == "1"
    assert type(os.environ) is os._Environ


def test_who_lists_all_variables_asks_for_those_that_are_set():
    assert reads_of(lambda: os.environ.copy() and None) == set(os.environ)


def test_an_error_leaves_the_environment_as_it_was():
    with pytest.raises(KeyError):
        reads_of(lambda: print(os.environ["NO_SUCH_VARIABLE"]))
    assert type(os.environ) is os._Environ
    assert Path(os.environ["HOME"])
