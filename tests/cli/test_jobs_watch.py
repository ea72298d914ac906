"""`footplate jobs list | describe | stacks | profile | stream-logs | cancel | wait | delete | resubmit | daemon`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from jobs.conftest import bench, is_held, until  # noqa: F401  a fixture

from footplate.jobs.states import State

SAVES_UNTIL_IT_MAY_END = """
def told(*_):
    until_there("may-end")
    sys.exit(143)
signal.signal(signal.SIGTERM, told)
(place / "ready").touch()
until_there("go")
"""
SUBMIT = ["--package-path", "trainer", "--module-name", "trainer.task", "--region", "us-central1", "--job-dir", "out"]


@pytest.fixture
def submit(footplate, bench, monkeypatch):  # noqa: F811
    """Runs `footplate jobs submit training NAME` with the bench's program."""
    monkeypatch.chdir(bench.directory)
    return lambda name, *argv: footplate("jobs", "submit", "training", name, *SUBMIT, *argv)


def test_submit_says_where_to_look_and_wait_ends_with_the_job(submit, footplate, bench):  # noqa: F811
    bench.program("print(sys.argv[1:])")
    result = submit("my_job", "--labels", "team=vision", "--", "--epochs", "2")
    assert result.code == 0
    assert "my_job is submitted." in result.out
    assert re.search(r"Its package has 2 files, 0\.\d KiB: trainer/__init__\.py, trainer/task\.py\.", result.err)
    assert "footplate jobs stream-logs my_job" in result.out
    result = footplate("jobs", "wait", "my_job")
    assert (result.code, result.out) == (0, "my_job is SUCCEEDED\n")
    assert bench.output() == f"['--epochs', '2', '--job-dir', '{bench.directory}/out']\n"


def test_streamed_logs_end_with_the_job_and_its_code(submit, footplate, bench):  # noqa: F811
    bench.program("print('hello'); sys.exit(2 if attempt == 1 else 0)")
    result = submit("my_job", "--stream-logs")
    assert (result.code, result.out) == (1, "[master-0] hello\n")
    assert "my_job is FAILED: master 0 ended with exit code 2" in result.err
    assert footplate("jobs", "wait", "my_job").code == 1
    footplate("jobs", "resubmit", "my_job")
    result = footplate("jobs", "stream-logs", "my_job")
    assert (result.code, result.out) == (0, "[master-0] hello\n[master-0] hello\n")
    assert "--- attempt 2 ---" in result.err
    assert footplate("jobs", "stream-logs", "my_job", "--tail", "1").out == "[master-0] hello\n"
    assert "--tail -1: expected a number of lines" in footplate("jobs", "stream-logs", "my_job", "--tail", "-1").err


def test_list_filters_and_limits(submit, footplate, bench):  # noqa: F811
    assert footplate("jobs", "list").out == "There are no such jobs.\n"
    bench.program("until_there('go') if sys.argv[1] == 'waits' else None")
    submit("first", "--labels", "team=vision", "--", "ends")
    footplate("jobs", "wait", "first")
    submit("second", "--", "waits")
    jobs = json.loads(footplate("jobs", "list", "--format", "json").out)
    assert [job["jobId"] for job in jobs] == ["second", "first"]
    for text, wanted in {
        "state=SUCCEEDED": ["first"],
        "labels.team=vision": ["first"],
        "labels.team=speech": [],
        "state=succeeded AND name=first": ["first"],
    }.items():
        jobs = json.loads(footplate("jobs", "list", "--filter", text, "--format", "json").out)
        assert [job["jobId"] for job in jobs] == wanted
    printed = footplate("jobs", "list", "--limit", "1")
    assert "second" in printed.out
    assert "first" not in printed.out
    assert printed.err == "1 more: --limit 2\n"


def test_describe_tells_what_has_happened(submit, footplate, bench):  # noqa: F811
    bench.program("")
    submit("my_job")
    footplate("jobs", "wait", "my_job")
    document = yaml.safe_load(footplate("jobs", "describe", "my_job").out)
    assert (document["state"], document["attempt"]) == ("SUCCEEDED", 1)
    assert [transition["to"] for transition in document["transitions"]] == [
        "QUEUED",
        "PREPARING",
        "RUNNING",
        "SUCCEEDED",
    ]
    assert document["processes"][0]["outcome"] == "ended with exit code 0"
    assert document["spec"]["trainingInput"]["pythonModule"] == "trainer.task"
    assert "history:" in footplate("jobs", "describe", "my_job", "--format", "table").out


HANGS = """
from footplate.launch import Restarts, launch

def waits_for_the_file():
    (place / ("ready-" + os.environ["RANK"])).touch()
    until_there("go")
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(300)

if __name__ == "__main__":
    try:
        launch(waits_for_the_file, world_size=2, preload=(), heartbeat_timeout_s=2, restarts=Restarts(0, peers_grace_s=0.1))
    except Exception as error:
        print(error)
        sys.exit(2)
"""


def test_a_job_shows_its_stacks_now_and_those_of_a_hang(submit, footplate, bench):  # noqa: F811
    bench.program(HANGS)
    submit("my_job")
    bench.there("ready-0")
    bench.there("ready-1")
    bench.is_in(State.RUNNING)

    result = footplate("jobs", "stacks", "my_job")
    assert result.code == 0
    where = r"(is|are) in `(waits_for_the_file|until_there)` \(.*/task\.py:\d+\)"
    assert re.search(where, result.out.splitlines()[0])
    assert re.search(r"^rank 0: process \d+", result.out, re.MULTILINE)
    assert re.search(r"^rank 1: process \d+", result.out, re.MULTILINE)

    (bench.directory / "go").touch()
    assert footplate("jobs", "wait", "my_job").code == 1
    described = yaml.safe_load(footplate("jobs", "describe", "my_job").out)
    (hang,) = described["hangs"]
    assert hang["attempt"] == 1
    assert "rank 1 is stopped (SIGSTOP)" in hang["sentence"]
    assert Path(hang["stacks"]).read_text().startswith(hang["sentence"] + "\n")
    assert "Rank 1 is stopped (SIGSTOP)" in described["cause"]
    table = footplate("jobs", "describe", "my_job", "--format", "table").out
    assert f"hangs:\n  attempt 1  {hang['sentence']}\n" in table
    assert "my_job is FAILED: only a running job has stacks." in footplate("jobs", "stacks", "my_job").err


def test_programs_are_told_in_json_whatever_they_ask(submit, footplate, bench):  # noqa: F811
    bench.program(SAVES_UNTIL_IT_MAY_END)

    def told(*argv: str) -> tuple[str, str, str]:
        document = json.loads(footplate("jobs", *argv, "my_job", "--format", "json").out)
        return document["jobId"], document["state"], document["backend"]

    assert json.loads(submit("my_job", "--format", "json").out)["jobId"] == "my_job"
    bench.there("ready")
    bench.is_in(State.RUNNING)
    assert told("describe") == ("my_job", "RUNNING", "local")
    assert told("cancel") == ("my_job", "CANCELLING", "local")
    (bench.directory / "may-end").touch()
    assert told("wait") == ("my_job", "CANCELLED", "local")
    (bench.directory / "go").touch()
    assert told("resubmit")[0] == "my_job"
    assert told("wait") == ("my_job", "SUCCEEDED", "local")
    assert json.loads(footplate("jobs", "list", "--format", "json").out)[0]["backend"] == "local"
    assert "give one of them" in submit("other", "--format", "json", "--stream-logs").err


def test_cancel_and_delete(submit, footplate, bench):  # noqa: F811
    bench.program(SAVES_UNTIL_IT_MAY_END)
    submit("my_job")
    bench.there("ready")
    bench.is_in(State.RUNNING)
    result = footplate("jobs", "delete", "my_job")
    assert (result.code, result.err) == (
        2,
        "footplate jobs: my_job is RUNNING. Cancel it first: footplate jobs cancel my_job\n",
    )
    assert footplate("jobs", "cancel", "my_job").out == "my_job is CANCELLING\n"
    (bench.directory / "may-end").touch()
    assert footplate("jobs", "wait", "my_job").code == 1
    assert footplate("jobs", "delete", "my_job").code == 0
    assert footplate("jobs", "list").out == "There are no such jobs.\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["describe", "flower_1"], 'there is no job "flower_1". Did you mean "flowers_1"? See: footplate jobs list'),
        (["wait", "../../etc"], 'there is no job "../../etc".'),
        (
            ["list", "--filter", "stat=RUNNING"],
            'expected KEY=VALUE, several with AND between them. Did you mean "state"?',
        ),
        (["list", "--filter", "state=RUNING"], 'there is no such state. Did you mean "RUNNING"?'),
        (["list", "--limit", "-1"], "--limit -1: expected the number of jobs to show"),
        (["list", "--limit", "x"], 'limit="x": expected an integer'),
        (["list", "--filtr", "x"], 'Did you mean "--filter"?'),
        (["lst"], 'Did you mean "list"?'),
        (["clean", "--unused-for", "long"], "--unused-for long: expected a time such as 7200s, 90m, 2h or 1d."),
        (["describe"], "name"),
    ],
)
def test_mistakes(submit, footplate, bench, argv, message):  # noqa: F811
    bench.program("")
    submit("flowers_1")
    result = footplate("jobs", *argv)
    assert result.code == 2
    assert message in result.err


def test_an_image_alone_is_refused_since_nothing_here_runs_containers(submit, footplate, bench):  # noqa: F811
    result = footplate(
        "jobs",
        "submit",
        "training",
        "my_job",
        "--master-image-uri",
        "gcr.io/project/image:1",
        "--region",
        "us-central1",
    )
    assert result.code == 2
    assert "names a container image and no module" in result.err


def test_the_daemon_brings_jobs_back_by_itself(bench):  # noqa: F811
    bench.program(
        textwrap.dedent(
            """
            (place / f"began-{attempt}").touch()
            if attempt == 1:
                time.sleep(600)
            """
        )
    )
    lock = bench.jobs.home.root / "sweep.lock"
    lock.mkdir()  # fails like a full file table, for a while
    command = [sys.executable, "-m", "footplate", "jobs", "daemon"]
    daemon = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert "Is a directory" in daemon.stderr.readline()
        lock.rmdir()
        bench.submit()
        bench.there("began-1")
        bench.is_in(State.RUNNING)
        os.kill(bench.supervisor(), signal.SIGKILL)
        until(lambda: bench.jobs.store.state("my_job") == State.SUCCEEDED)  # only the daemon reconciles
        assert (bench.directory / "began-2").exists()
    finally:
        daemon.terminate()
        daemon.communicate()
        assert daemon.returncode == 0


def test_a_list_is_sorted_as_it_is_asked(submit, footplate, bench):  # noqa: F811
    bench.program("")
    for name, priority in (("low", "1"), ("high", "900"), ("middle", "50")):
        submit(name, "--priority", priority)
    for order, wanted in {"priority": ["low", "middle", "high"], "~jobId": ["middle", "low", "high"]}.items():
        document = json.loads(footplate("jobs", "list", "--sort-by", order, "--format", "json").out)
        assert [job["jobId"] for job in document] == wanted
    for name in ("low", "high", "middle"):
        footplate("jobs", "wait", name)


def test_clean_says_what_it_deletes_and_how_large_it_is(submit, footplate, bench):  # noqa: F811
    bench.program("")
    submit("my_job")
    footplate("jobs", "wait", "my_job")
    (lock,) = bench.jobs.home.root.glob("unpacked/*/*.lock")
    until(lambda: not is_held(lock))  # its supervisor has ended
    assert footplate("jobs", "clean").out == "0 deleted, 0.0 MiB\n"
    for path in [*bench.jobs.home.root.glob("packages/*"), *bench.jobs.home.root.glob("unpacked/*/*")]:
        os.utime(path, (1e9, 1e9))
    printed = footplate("jobs", "clean", "--dry-run").out
    assert printed.splitlines()[0].startswith("package ")
    assert printed.splitlines()[-1].startswith("2 would be deleted, ")
    assert footplate("jobs", "clean", "--unused-for", "90d").out.splitlines()[-1].startswith("2 deleted, ")
    assert footplate("jobs", "clean", "--unused-for", "90d").out == "0 deleted, 0.0 MiB\n"
