"""`jobs submit` starts the supervisor before the job exists: the job is the same, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from footplate.jobs.states import State
from jobs.conftest import Bench, until

SUPERVISOR = "footplate.jobs.supervision.supervisor"


def command(name: str, *options: str) -> list[str]:
    given = ["--package-path", "trainer", "--module-name", "trainer.task", "--region", "us-central1"]
    return [sys.executable, "-m", "footplate", "jobs", "submit", "training", name, *given, *options]


def reserves(directory: Path) -> list[int]:
    """Processes that wait for a job of this home."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            ours = os.fsencode(directory) in (process / "environ").read_bytes()
            if ours and words[-2:] == [SUPERVISOR.encode(), b""]:
                pids.append(int(process.name))
    return pids


@pytest.fixture
def submit(bench: Bench):
    bench.program("print('hello')")

    def run(name: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, **variables}
        return subprocess.run(
            command(name, *options), cwd=bench.directory, env=environ, capture_output=True, text=True, check=False
        )

    return run


def test_a_job_is_supervised_by_the_process_that_was_there_before_it(submit, bench):
    bench.program("until_there('go')")
    assert submit("my_job").returncode == 0
    bench.is_in(State.RUNNING)
    assert reserves(bench.jobs.home.root) == [bench.supervisor()]
    (bench.directory / "go").touch()
    bench.is_in(State.SUCCEEDED)
    until(lambda: not reserves(bench.jobs.home.root))
    assert bench.states() == ["QUEUED", "PREPARING", "RUNNING", "SUCCEEDED"]


@pytest.mark.parametrize(
    "options", [["--scale-tier", "BASICS"], ["--worker-count", "many"], ["--package-path", "none"]]
)
def test_it_ends_with_a_command_that_submits_nothing(submit, bench, options):
    assert submit("my_job", *options).returncode == 2
    until(lambda: not reserves(bench.jobs.home.root))
    assert bench.jobs.store.count() == 0


def test_it_ends_when_the_job_has_to_wait(submit, bench):
    bench.program("until_there('go')")
    assert submit("first", FOOTPLATE_CPUS="1").returncode == 0
    assert submit("my_job", FOOTPLATE_CPUS="1").returncode == 0
    until(lambda: reserves(bench.jobs.home.root) == [bench.supervisor("first")])
    assert bench.jobs.store.state("my_job") == State.QUEUED
    (bench.directory / "go").touch()
    bench.is_in(State.SUCCEEDED)


def test_it_ends_with_a_command_that_is_killed(bench):
    bench.program("")
    with bench.jobs.home.exclusive():  # which the command waits for
        process = subprocess.Popen(command("my_job"), cwd=bench.directory)
        until(lambda: reserves(bench.jobs.home.root))
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda: not reserves(bench.jobs.home.root))
    assert bench.jobs.store.count() == 0


def test_a_job_whose_reserve_died_gets_another_supervisor(bench):
    bench.program("print('hello')")
    with bench.jobs.home.exclusive():
        process = subprocess.Popen(command("my_job"), cwd=bench.directory)
        (waiting,) = until(lambda: reserves(bench.jobs.home.root))
        os.kill(waiting, signal.SIGKILL)
        until(lambda: not reserves(bench.jobs.home.root))
    assert process.wait() == 0
    bench.is_in(State.SUCCEEDED)
    assert bench.jobs.store.find("my_job").losses == 0


def test_it_finds_the_same_home_and_no_module_of_the_folder_where_the_command_was_given(submit, bench):
    (bench.directory / "sqlite3.py").write_text("raise SystemError('imported by mistake')")
    bench.jobs.home.root.rename(bench.directory / "home")
    script = [str(Path(sys.executable).parent / "footplate"), *command("my_job")[3:]]
    environ = {**os.environ, "FOOTPLATE_HOME": "home", "FOOTPLATE_TOKEN": "not for jobs"}
    subprocess.run(script, cwd=bench.directory, env=environ, check=True, capture_output=True)
    log = bench.directory / "home" / "jobs" / "my_job" / "attempt-1" / "master-0.log"
    until(lambda: log.exists() and log.read_text() == "hello\n")
    assert (log.parents[1] / "supervisor.log").read_text() == ""
