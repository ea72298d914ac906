"""The runner reports the outcome of each case, and leaves no process behind. The suites here have a few lines each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from foreign import __main__ as command
from foreign import cases
from foreign.running import run
from foreign.suites import SUITES, Suite

TESTS = Path(__file__).parent.parent

# A case that starts a process in a session of its own, writes its id to a file, and then waits.
LEAVES_A_PROCESS = """
import os, subprocess, sys, time
def test_waits():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open(os.environ["PID_FILE"] + ".part", "w") as file:
        file.write(str(child.pid))
    os.rename(os.environ["PID_FILE"] + ".part", os.environ["PID_FILE"])
    time.sleep(600)
"""


def make_suite(folder: Path, text: str, **settings: object) -> Suite:
    test = folder / "test_it.py"
    test.write_text(text)
    with tarfile.open(folder / "tests.tar.gz", "w:gz") as archive:
        archive.add(test, "tests/test_it.py")
    return Suite("made", "tests.tar.gz", "tests", "tests", ("test_it.py",), **settings)  # pyright: ignore


def is_alive(process: int) -> bool:
    """Return True if a process runs. A zombie doesn't."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def await_(condition, limit_s: float = 60.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_a_file_that_takes_too_long_is_ended_with_the_processes_it_started(tmp_path):
    suite = make_suite(tmp_path, LEAVES_A_PROCESS, environment={"PID_FILE": str(tmp_path / "pid")})
    outcomes = run(suite, tmp_path, ["test_it.py"], None, 1, file_s=15.0)
    assert outcomes["test_it.py::test_waits"].error == "the process ended inside the case"
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_a_case_that_takes_too_long_is_ended_with_the_processes_it_started(tmp_path):
    text = (
        LEAVES_A_PROCESS
        + """
def test_next():
    with open(os.environ["PID_FILE"]) as file:
        state = f"/proc/{file.read()}/stat"
    assert not os.path.exists(state) or open(state).read().rsplit(")", 1)[1].split()[0] == "Z"
"""
    )
    suite = make_suite(tmp_path, text, case_s=2.0, environment={"PID_FILE": str(tmp_path / "pid")})
    outcomes = run(suite, tmp_path, ["test_it.py"], None, 1, file_s=120.0)
    assert "Timeout" in outcomes["test_it.py::test_waits"].error
    assert outcomes["test_it.py::test_next"].outcome == "passed"


def test_a_runner_that_is_terminated_ends_what_it_has_started(tmp_path):
    make_suite(tmp_path, LEAVES_A_PROCESS)
    program = f"""
import sys
from foreign import __main__ as command, cases
from foreign.suites import SUITES, Suite
SUITES.clear()
SUITES["made"] = Suite(
    "made", "tests.tar.gz", "tests", "tests", ("test_it.py",), environment={{"PID_FILE": {str(tmp_path / "pid")!r}}}
)
sys.exit(command.main(["--from", {str(tmp_path)!r}, "--all"]))
"""
    runner = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(TESTS)})
    try:
        await_((tmp_path / "pid").exists)
        runner.send_signal(signal.SIGTERM)
        assert runner.wait(60) == 143
    finally:
        runner.kill()
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_of_failing_ranks_the_first_failure_is_shown(tmp_path):
    text = """
import os, time
def test_it():
    if os.environ["RANK"] == "0":
        time.sleep(1)
        raise ConnectionError("the other rank failed")
    raise ValueError("the cause")
def test_passes():
    pass
"""
    outcomes = run(make_suite(tmp_path, text, ranks=2), tmp_path, ["test_it.py"], None, 1, file_s=120.0)
    assert outcomes["test_it.py::test_it"].error == "rank 1: ValueError: the cause"
    assert outcomes["test_it.py::test_passes"].outcome == "passed"


def test_a_failure_in_teardown_is_a_failure_and_says_where(tmp_path):
    text = """
import pytest
@pytest.fixture
def left():
    yield
    raise ValueError("a thread is left")
def test_it(left):
    pass
"""
    outcomes = run(make_suite(tmp_path, text), tmp_path, ["test_it.py"], None, 1, file_s=120.0)
    outcome = outcomes["test_it.py::test_it"]
    assert (outcome.outcome, outcome.phase, outcome.error) == ("failed", "teardown", "ValueError: a thread is left")


def test_files_that_the_time_for_the_whole_leaves_out_did_not_run(tmp_path, capsys):
    suite = make_suite(tmp_path, "def test_it(): pass")
    assert run(suite, tmp_path, ["test_it.py"], None, 1, file_s=120.0, until=time.monotonic() - 1.0) == {}
    assert "the time for the whole is over" in capsys.readouterr().out


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A suite "made" of two cases, with a list that a test writes."""
    suite = make_suite(tmp_path, "def test_a(): pass\ndef test_b(): raise ValueError('wrong')")
    monkeypatch.setitem(SUITES, "made", suite)
    monkeypatch.setattr(cases, "FOLDER", tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path / "made.txt"
    signal.signal(signal.SIGTERM, before)


def run_made(list_: Path, *arguments: str) -> int:
    return command.main(["--from", str(list_.parent), "--suite", "made", *arguments])


def test_an_empty_list_is_no_success(made, capsys):
    made.write_text("# A list.\n")
    assert run_made(made) == 1
    assert "made: no case was chosen: made.txt has 0 entries" in capsys.readouterr().out


def test_arguments_that_choose_nothing_are_no_success(made, capsys, tmp_path_factory):
    made.write_text("# A list.\n\n[test_it.py]\npasses test_a\n")
    assert run_made(made, "--files", "test_other.py") == 1
    assert "no case was chosen" in capsys.readouterr().out
    assert command.main(["--from", str(tmp_path_factory.mktemp("empty")), "--suite", "made"]) == 1
    assert "no suite ran" in capsys.readouterr().out


def test_a_listed_file_that_the_archive_lacks_is_named(made, capsys):
    made.write_text("# A list.\n\n[test_gone.py]\npasses test_a\n")
    assert run_made(made) == 1
    assert "test_gone.py::test_a is listed as passing, and did not run" in capsys.readouterr().out


def test_a_broken_case_is_counted_as_broken_and_an_update_keeps_reasons(made, capsys):
    made.write_text("# A list.\n\n[test_it.py]\ndiffers test_a | a reason\npasses test_b\n")
    assert run_made(made) == 1
    printed = capsys.readouterr().out
    assert "test_b is listed as passing, and failed: ValueError: wrong" in printed
    assert "made: 1 passes, 1 broken" in printed
    made.write_text("# A list.\n\n[test_it.py]\ndiffers test_b | a reason\n")
    assert run_made(made, "--all", "--update") == 0
    assert cases.read(made) == {
        "test_it.py::test_a": cases.Entry("passes"),
        "test_it.py::test_b": cases.Entry("differs", "a reason"),
    }


def test_a_quick_run_takes_passing_cases_of_files_that_have_several(made, tmp_path, capsys):
    SUITES["made"] = make_suite(tmp_path, "def test_a(): pass\ndef test_b(): raise ValueError('wrong')", quick_cases=2)
    made.write_text("# A list.\n\n[test_it.py]\npasses test_a\ndiffers test_b | why\n")
    assert run_made(made, "--quick") == 1
    assert "no case was chosen" in capsys.readouterr().out
    SUITES["made"] = make_suite(tmp_path, "def test_a(): pass\ndef test_b(): raise ValueError('wrong')", quick_cases=1)
    assert run_made(made, "--quick") == 0
    assert "made: 1 passes (" in capsys.readouterr().out
