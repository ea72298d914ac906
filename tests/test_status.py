"""The page of the status: its results are those of the record, and each row names tests that exist.

The record itself is written by `passed.Recorder`, for sessions that run whole files.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import status_page
import template
from passed import ROOT, Environment, Recorder, Run, merged, recorded

PAGE = status_page.DOCS.read_text()
HERE = Environment("CPU", "Linux x86_64", {"Python": "3.11.7", "torch": "2.13.0"})


def session(*, hardware: str = "CPU", torch: str = "2.13.0", **passed: int) -> Environment:
    """A session of some files, with the number of tests that passed in each."""
    runs = {f"tests/{name}.py": Run("2026-11-28", count) for name, count in passed.items()}
    return Environment(hardware, HERE.system, {**HERE.versions, "torch": torch}, runs)


def test_the_page_has_the_results_of_the_record():
    assert status_page.filled(PAGE) == PAGE, "make tables"


@pytest.mark.parametrize(("what", "names"), status_page.rows(PAGE).items(), ids=status_page.rows(PAGE))
def test_a_row_names_tests_that_exist(what, names):
    assert [name for name in names if not status_page.files_of(name)] == []


def test_only_the_row_of_an_older_torch_names_no_test():
    assert [what for what, names in status_page.rows(PAGE).items() if not names] == [
        "torch 2.11, the oldest that is allowed"
    ]


def test_a_cell_has_a_result_for_each_hardware_and_says_which_tests_have_none():
    environments = [
        session(**{"data/test_table": 1200, "data/test_order": 34}),
        session(hardware="NVIDIA H200", test_b=5),
    ]
    names = ["data", "test_b", "launch/test_conformance (ray)"]
    cell = status_page.cell(names, environments)
    assert cell == (
        "CPU 1,234; NVIDIA H200 5: [`data`](../tests/data), [`test_b`](../tests/test_b.py); "
        "not recorded: [`launch/test_conformance (ray)`](../tests/launch/test_conformance.py)"
    )
    assert status_page.names_in(cell) == names


def test_runs_with_several_versions_are_added_up():
    environments = [session(test_a=1), session(torch="2.14.0", test_b=2)]
    assert status_page.cell(["test_*"], environments) == "CPU 3: [`test_*`](../tests/)"


def test_a_test_that_two_names_stand_for_counts_once_and_a_failure_is_told():
    environment = Environment("CPU", "", {}, {"tests/data/test_table.py": Run("2026-11-28", 7, failed=2)})
    cell = status_page.cell(["data", "data/test_t*"], [environment])
    assert cell == "CPU 7 (2 failed): [`data`](../tests/data), [`data/test_t*`](../tests/data)"


def test_a_session_replaces_the_runs_of_its_files_and_keeps_all_others():
    record = merged([session(test_a=1, test_b=2)], [session(test_b=3)])
    assert record == [session(test_a=1, test_b=3)]


def test_a_session_on_other_hardware_adds_to_the_record():
    record = merged([session(test_a=1)], [session(hardware="NVIDIA H200", test_a=5)])
    assert record == [session(test_a=1), session(hardware="NVIDIA H200", test_a=5)]


def test_a_file_that_ran_with_other_versions_is_recorded_with_these_alone():
    record = merged([session(test_a=1, test_b=2)], [session(torch="2.14.0", test_a=1)])
    assert record == [session(test_b=2), session(torch="2.14.0", test_a=1)]
    assert merged(record, [session(torch="2.14.0", test_b=2)]) == [session(torch="2.14.0", test_a=1, test_b=2)]


def report(test: str, outcome: str = "passed", when: str = "call", marks: tuple[str, ...] = ()) -> pytest.TestReport:
    return pytest.TestReport(test, ("", 0, ""), dict.fromkeys(marks, 1), outcome, None, when)  # type: ignore[arg-type]


def test_the_recorder_counts_by_file_by_engine_and_apart_the_tests_that_run_alone(tmp_path):
    recorder = Recorder(tmp_path / "passed.json")
    conformance = "tests/launch/test_conformance.py"
    for each in [
        report("tests/test_status.py::test_a"),
        report("tests/test_status.py::test_a", when="teardown"),
        report("tests/test_status.py::test_b[ray]"),
        report("tests/test_status.py::test_c"),
        report("tests/test_status.py::test_c", "failed", when="teardown"),
        report("tests/test_status.py::test_d", "skipped"),
        report(f"{conformance}::test_a[ray]"),
        report(f"{conformance}::test_a[ray-2]"),
        report(f"{conformance}::test_a[spark]"),
        report("tests/test_chaos.py::test_a", marks=("alone",)),
        report("tests/test_that_is_gone.py::test_a"),
    ]:
        recorder.pytest_runtest_logreport(each)
    recorder.pytest_sessionfinish(1)
    (environment,) = recorded(tmp_path / "passed.json")
    assert {part: (run.passed, run.failed) for part, run in environment.runs.items()} == {
        f"{conformance}[ray]": (2, 0),
        f"{conformance}[spark]": (1, 0),
        "tests/test_chaos.py alone": (1, 0),
        "tests/test_status.py": (2, 1),
    }
    assert environment.hardware == "CPU"
    assert environment.versions["torch"].startswith("2.")


def test_an_interrupted_session_is_not_recorded(tmp_path):
    recorder = Recorder(tmp_path / "passed.json")
    recorder.pytest_runtest_logreport(report("tests/test_status.py::test_a"))
    recorder.pytest_sessionfinish(pytest.ExitCode.INTERRUPTED)
    assert not (tmp_path / "passed.json").exists()


@pytest.mark.slow
def test_a_session_of_some_tests_of_a_file_is_refused():
    for arguments in (["-k", "a"], ["--fast"], ["-x"], ["-m", "slow"], ["tests/test_status.py::report"]):
        command = [sys.executable, "-m", "pytest", "--record-passed", *arguments, "--collect-only", "-q"]
        process = template.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, errors = process.communicate(timeout=300)
        assert process.returncode == pytest.ExitCode.USAGE_ERROR, out
        assert "--record-passed records whole files" in errors
