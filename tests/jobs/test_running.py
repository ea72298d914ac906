"""Jobs on this machine, with real supervisors and processes, which are killed."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

from footplate.cli import jobs_submit
from footplate.core.errors import ConfigError, PackageError
from footplate.jobs.spec.draft import draft
from footplate.jobs.spec.resolving import resolve
from footplate.jobs.spec.yamlfile import parse
from footplate.jobs.states import State
from footplate.jobs.submission import PlannedJob, dry_run
from footplate.jobs.supervision import reconcile, supervisor
from footplate.jobs.supervision.follow import Line
from footplate.jobs.supervision.identity import Identity
from jobs.conftest import CLUSTER, NET, Bench, until

UNTIL_KILLED = """
(place / f"begun-{attempt}").write_text(str(os.getpid()))
if attempt == 1:
    time.sleep(600)
print("again")
"""

SAVES_WHEN_TOLD = """
def told(*_):
    print("saving", flush=True)
    (place / f"saved-{attempt}").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, told)
(place / "ready").touch()
time.sleep(600)
"""


def gone(pid: int) -> bool:
    return Identity.of(pid) is None


def test_a_job_runs_its_module_with_its_arguments_and_finds_its_directory(bench: Bench):
    bench.program(
        """
        print(sys.argv[1:])
        print("to standard error", file=sys.stderr)
        (Path(sys.argv[-1]) / "model").write_text("trained")
        """
    )
    bench.job_dir = str(bench.directory / "runs" / "first")
    bench.submit(args=("--epochs", "2"))
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt, job.failures, job.losses) == (State.SUCCEEDED, 1, 0, 0)
    assert bench.states() == ["QUEUED", "PREPARING", "RUNNING", "SUCCEEDED"]
    wanted = ["--epochs", "2", "--job-dir", bench.job_dir]
    assert bench.output() == f"{wanted}\nto standard error\n"
    assert Path(bench.job_dir, "model").read_text() == "trained"
    (process,) = bench.jobs.store.processes("my_job")
    assert process.outcome == "ended with exit code 0"
    # The home is the user's alone.
    assert bench.jobs.home.root.stat().st_mode & 0o777 == 0o700


def test_what_is_edited_after_submission_changes_nothing(bench: Bench):
    bench.program('(place / "began").touch(); until_there("go"); import trainer.late; print(trainer.late.WORD)')
    late = bench.directory / "trainer" / "late.py"
    late.write_text("WORD = 'as submitted'")
    bench.submit()
    late.write_text("WORD = 'edited'")
    (bench.directory / "go").touch()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    assert bench.output() == "as submitted\n"


def test_an_exception_that_comes_again_is_the_codes_fault(bench: Bench):
    bench.program('print("so far", flush=True); raise ValueError("too large")')
    bench.submit()
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt, job.failures) == (State.FAILED, 2, 1)
    assert job.cause.startswith("master 0 ended with exit code 1: ValueError: too large (as in the attempt before it")
    assert bench.jobs.store.transitions("my_job")[3].cause == (
        "master 0 ended with exit code 1: ValueError: too large; restart 1 of 3"
    )
    assert "ValueError: too large" in bench.output(attempt=2)


def test_a_mistake_is_not_tried_again(bench: Bench):
    bench.program("import argparse; argparse.ArgumentParser().parse_args()")
    bench.submit(args=("--unheard-of",))
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt) == (State.FAILED, 1)
    assert job.cause.startswith("master 0 ended with exit code 2: task.py: error: unrecognized arguments: --unheard-of")


def test_a_killed_process_is_started_again_as_a_new_attempt(bench: Bench):
    bench.program(UNTIL_KILLED)
    bench.submit()
    os.kill(int(until(lambda: bench.there("begun-1").read_text())), signal.SIGKILL)
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt, job.failures, job.losses) == (State.SUCCEEDED, 2, 1, 0)
    assert bench.output(attempt=2) == "again\n"


def test_a_preempted_process_costs_no_restart_of_the_users(bench: Bench):
    bench.program(UNTIL_KILLED)
    bench.submit()
    os.kill(int(until(lambda: bench.there("begun-1").read_text())), signal.SIGTERM)
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt, job.failures, job.losses) == (State.SUCCEEDED, 2, 0, 1)


@pytest.mark.slow
def test_a_supervisor_that_cannot_sweep_looks_after_its_job_all_the_same(bench: Bench):
    bench.program('(place / "began").touch(); until_there("go")')
    bench.submit()
    bench.there("began")
    lock, log = bench.jobs.home.root / "sweep.lock", bench.jobs.home.job("my_job") / "supervisor.log"
    lock.rename(lock.with_suffix(".away"))
    lock.mkdir()  # fails like a full file table, or like processes that can't start
    until(lambda: "Is a directory" in log.read_text())
    lock.rmdir()
    (bench.directory / "go").touch()
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt) == (State.SUCCEEDED, 1)


def test_a_killed_supervisor_takes_its_processes_along_and_the_next_sweep_begins_anew(bench: Bench):
    bench.program(UNTIL_KILLED)
    bench.submit()
    process = int(until(lambda: bench.there("begun-1").read_text()))
    bench.is_in(State.RUNNING)
    os.kill(bench.supervisor(), signal.SIGKILL)
    until(lambda: gone(process))
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt, job.failures, job.losses) == (State.SUCCEEDED, 2, 0, 1)
    assert bench.jobs.store.transitions("my_job")[3].cause == "its supervisor was lost"


def test_after_a_reboot_a_job_goes_on(bench: Bench):
    bench.program(UNTIL_KILLED)
    bench.submit()
    until(lambda: bench.there("begun-1").read_text())
    bench.is_in(State.RUNNING)
    pid = bench.supervisor()
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid))
    # After a reboot, the number may be any process's: here it is this one's.
    bench.jobs.store.own("my_job", {"pid": os.getpid(), "began": 1.0, "boot": "another"})
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt, job.losses) == (State.SUCCEEDED, 2, 1)
    assert bench.jobs.store.transitions("my_job")[3].cause == "the machine was restarted"


def test_sweeps_at_once_start_one_supervisor(bench: Bench):
    bench.program('(place / f"began-{os.getpid()}").touch(); until_there("go")')
    bench.submit()
    pid = bench.supervisor()
    until(lambda: list(bench.directory.glob("began-*")))
    bench.is_in(State.RUNNING)
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid))
    script = "from footplate.jobs.operations import Jobs; from footplate.jobs.supervision.reconcile import reconcile; "
    script += "jobs = Jobs.from_env(); [reconcile(jobs.home, jobs.store) for _ in range(5)]"
    sweeps = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    assert [sweep.wait() for sweep in sweeps] == [0, 0, 0]
    (bench.directory / "go").touch()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    assert bench.states() == ["QUEUED", "PREPARING", "RUNNING", "PREPARING", "RUNNING", "SUCCEEDED"]
    assert len(list(bench.directory.glob("began-*"))) == 2


def test_a_second_supervisor_of_a_job_ends_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    bench.program('(place / "began").touch(); until_there("go")')
    bench.submit()
    bench.there("began")
    monkeypatch.setattr(supervisor, "LOCK_S", 0.0)
    owner = bench.supervisor()
    supervisor.main("my_job")
    assert bench.supervisor() == owner
    (bench.directory / "go").touch()
    assert bench.jobs.wait("my_job").attempt == 1


def test_the_submitting_shell_may_be_killed(bench: Bench):
    bench.program('(place / "began").touch(); until_there("go"); print("done")')
    command = [sys.executable, "-m", "footplate", "jobs", "submit", "training", "my_job", "--package-path", "trainer"]
    command += ["--module-name", "trainer.task", "--job-dir", "out", "--region", "us-central1", "--stream-logs"]
    shell = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    bench.there("began")
    os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()
    (bench.directory / "go").touch()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    assert bench.output() == "done\n"


def test_a_supervisor_that_is_always_lost_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    bench.program("time.sleep(600)")
    bench.submit()
    bench.is_in(State.RUNNING)
    monkeypatch.setattr(reconcile, "LIMITS", reconcile.Restarts(max_host_restarts=0))
    pid = bench.supervisor()
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid))
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt) == (State.FAILED, 1)
    assert job.cause == "its supervisor was lost; max_host_restarts=0 is used up"


def test_a_cancelled_job_may_save_first(bench: Bench):
    bench.program(SAVES_WHEN_TOLD)
    bench.submit()
    bench.there("ready")
    assert bench.jobs.cancel("my_job") in (State.CANCELLING, State.CANCELLED)
    assert bench.jobs.wait("my_job").state == State.CANCELLED
    assert (bench.directory / "saved-1").exists()
    assert bench.output() == "saving\n"
    assert bench.states()[-2:] == ["CANCELLING", "CANCELLED"]


def test_a_cancelled_job_whose_supervisor_is_dead_is_cancelled_at_once(bench: Bench):
    bench.program("time.sleep(600)")
    bench.submit()
    bench.is_in(State.RUNNING)
    pid = bench.supervisor()
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid))
    assert bench.jobs.cancel("my_job") == State.CANCELLED


def test_a_job_that_takes_too_long_is_ended(bench: Bench):
    bench.program(SAVES_WHEN_TOLD)
    bench.submit(max_running_time="3s")
    job = bench.jobs.wait("my_job")
    assert (job.state, job.cause) == (State.FAILED, "its maximum running time of 3 s is over")
    assert not (bench.directory / "ready").exists() or (bench.directory / "saved-1").exists()


def test_sigterm_to_a_supervisor_is_passed_on_and_the_job_goes_on_later(bench: Bench):
    bench.program(
        """
        if attempt == 1:
            def told(*_):
                (place / "saved").touch()
                sys.exit(143)
            signal.signal(signal.SIGTERM, told)
            (place / "ready").touch()
            time.sleep(600)
        """
    )
    bench.submit()
    bench.there("ready")
    bench.is_in(State.RUNNING)
    pid = bench.supervisor()
    os.kill(pid, signal.SIGTERM)
    until(lambda: gone(pid))
    assert (bench.directory / "saved").exists()
    assert bench.jobs.store.state("my_job") == State.RUNNING
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt, job.losses) == (State.SUCCEEDED, 2, 1)


def test_when_the_master_is_done_parameter_servers_are_stopped_and_evaluators_finish(bench: Bench):
    bench.program(
        """
        (place / f"{role}-began").touch()
        if role == "ps":
            time.sleep(600)
        for other in ("chief", "worker", "ps", "evaluator"):
            until_there(f"{other}-began")
        if role == "evaluator":
            until_there("over")
            print("evaluated")
        if role == "chief":
            (place / "over").touch()
        """
    )
    bench.submit(text=CLUSTER)
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    outcomes = {process.role: process.outcome for process in bench.jobs.store.processes("my_job")}
    assert outcomes == {
        "master": "ended with exit code 0",
        "worker": "ended with exit code 0",
        "parameter_server": "was killed by SIGTERM",
        "evaluator": "ended with exit code 0",
    }
    assert bench.output(who="evaluator-0") == "evaluated\n"


@pytest.mark.slow
def test_a_worker_that_fails_ends_the_attempt_of_all(bench: Bench):
    bench.program(
        """
        (place / f"{role}-{attempt}").touch()
        if attempt == 1:
            until_there("chief-1")
            if role == "worker":
                sys.exit(7)
            time.sleep(600)
        if role == "evaluator":
            sys.exit(1)  # stops nobody
        """
    )
    bench.submit(text=CLUSTER)
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt, job.failures) == (State.SUCCEEDED, 2, 1)
    assert bench.jobs.store.transitions("my_job")[3].cause == "worker 0 ended with exit code 7; restart 1 of 3"


def test_what_a_process_leaves_behind_ends_with_it(bench: Bench):
    bench.program(
        """
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        (place / "child").write_text(str(child.pid))
        """
    )
    bench.submit()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    assert gone(int((bench.directory / "child").read_text()))


def test_jobs_wait_for_room_and_begin_by_priority_then_age(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOOTPLATE_CPUS", "1")  # as many as one of them is charged for
    bench.program("until_there('go'); open(place / 'order', 'a').write(sys.argv[1] + '\\n')")
    for name, priority in (("first", 0), ("second", 0), ("third", 0), ("urgent", 500)):
        bench.submit(name, args=(name,), priority=str(priority))
    bench.is_in(State.RUNNING, "first")
    assert [str(bench.jobs.store.state(queued)) for queued in ("second", "third", "urgent")] == ["QUEUED"] * 3
    (bench.directory / "go").touch()
    for name in ("first", "second", "third", "urgent"):
        assert bench.jobs.wait(name).state == State.SUCCEEDED
    assert (bench.directory / "order").read_text().split() == ["first", "urgent", "second", "third"]


def test_more_than_the_machine_has_is_said_and_run_all_the_same(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOOTPLATE_CPUS", "2")
    bench.program("print('ran')")
    said = bench.submit(scale_tier="BASIC_GPU")
    assert any(text.startswith("The spec asks for 8 vCPU (this machine has 2)") for text in said)
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED


def test_secrets_of_the_shell_reach_neither_the_job_nor_the_disk(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    secrets = {"FOOTPLATE_TOKEN": "s3cret1", "GITHUB_TOKEN": "s3cret2", "MY_PASSWORD": "s3cret3"}
    for name, value in {**secrets, "AWS_SECRET_ACCESS_KEY": "s3cret4", "AWS_REGION": "eu-west-1"}.items():
        monkeypatch.setenv(name, value)
    bench.program(
        """
        print(json.dumps(dict(os.environ)))
        print(Path(f"/proc/{os.getppid()}/environ").read_text().count("FOOTPLATE_TOKEN"))
        """
    )
    bench.submit()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    variables, of_supervisor = bench.output().splitlines()
    given = json.loads(variables)
    # Not even a supervisor has a server's token.
    assert of_supervisor == "0"
    assert not secrets.keys() & given.keys()
    assert (given["AWS_SECRET_ACCESS_KEY"], given["AWS_REGION"]) == ("s3cret4", "eu-west-1")
    (bench.jobs.home.attempt("my_job", 1) / "master-0.log").unlink()  # which has what the program has printed
    for path in bench.jobs.home.root.rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), path


def test_output_is_followed_over_attempts_while_it_is_written(bench: Bench):
    bench.program(
        "print(f'in attempt {attempt}', flush=True); until_there(f'go-{attempt}'); sys.exit(5 * (attempt == 1))"
    )
    bench.submit()
    lines = []
    for event in bench.jobs.follow("my_job"):
        if isinstance(event, Line):
            lines.append((event.attempt, event.source, event.text))
            (bench.directory / f"go-{event.attempt}").touch()  # only now it goes on: what was written was read before
    assert lines == [(1, "master-0", "in attempt 1\n"), (2, "master-0", "in attempt 2\n")]


def test_a_job_that_has_not_ended_is_not_deleted_and_names_are_not_used_twice(bench: Bench):
    bench.program("until_there('go')")
    bench.submit()
    with pytest.raises(ConfigError, match="there is a job my_job already"):
        bench.submit()
    with pytest.raises(ConfigError, match="Cancel it first"):
        bench.jobs.delete("my_job")
    with pytest.raises(ConfigError, match="wait until it ends"):
        bench.jobs.resubmit("my_job")
    (bench.directory / "go").touch()
    bench.jobs.wait("my_job")
    bench.jobs.delete("my_job")
    assert not bench.jobs.home.job("my_job").exists()
    with pytest.raises(ConfigError, match='no job "my_job"'):
        bench.jobs.find("my_job")
    bench.submit()
    assert bench.jobs.wait("my_job").attempt == 1


def test_a_disk_without_room_for_a_package_is_told_in_a_sentence(bench: Bench):
    bench.program("")
    (bench.directory / "trainer" / "weights").write_bytes(bytes(2**21))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"File too large\. Free space"):
            bench.submit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert bench.jobs.store.count() == 0
    assert not list((bench.jobs.home.root / "packages").iterdir())
    bench.submit()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED


def test_what_a_job_has_left_that_was_deleted_on_another_machine_is_not_its_successors(bench: Bench):
    for word in ("first", "second"):
        bench.program(f"print({word!r})")
        bench.submit()
        assert bench.jobs.wait("my_job").state == State.SUCCEEDED
        assert bench.output() == f"{word}\n"
        assert bench.jobs.store.delete("my_job") is None  # as another machine does it that shares the store


def test_a_resubmitted_job_counts_its_attempts_on(bench: Bench):
    bench.program("sys.exit(2 * (attempt == 1))")
    bench.submit()
    assert bench.jobs.wait("my_job").state == State.FAILED
    bench.jobs.resubmit("my_job")
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt, job.failures) == (State.SUCCEEDED, 2, 0)
    with pytest.raises(ConfigError, match="nothing to repeat"):
        bench.jobs.resubmit("my_job")


def test_a_job_whose_package_is_gone_fails_with_the_reason(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOOTPLATE_CPUS", "1")
    bench.program("until_there('go')")
    bench.submit("first")
    bench.program("until_there('go'); print('another program')")
    bench.submit("second")
    (bench.jobs.home.root / "packages" / f"{bench.jobs.store.find('second').plan['package']}.tar").unlink()
    (bench.directory / "go").touch()
    job = bench.jobs.wait("second")
    assert (job.state, job.attempt) == (State.FAILED, 1)
    assert "the job's package was deleted. Submit the job again." in job.cause


def test_a_job_whose_variables_are_damaged_fails_with_the_reason(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOOTPLATE_CPUS", "1")
    bench.program("until_there('go')")
    bench.submit("first")
    bench.submit("second")
    (bench.jobs.home.job("second") / "environment.json").write_text("")  # as a machine's sudden end may leave a file
    (bench.directory / "go").touch()
    job = bench.jobs.wait("second")
    assert (job.state, job.attempt) == (State.FAILED, 1)
    assert "environment.json can't be read" in job.cause


TRAINS = NET + textwrap.dedent(
    """
    import os, signal, sys

    class Told(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            print(trainer.global_step, float(outputs).hex(), flush=True)
            if trainer.global_step == 6 and os.environ["FOOTPLATE_JOB_ATTEMPT"] == "1":
                while sys.argv[2] == "nobody":
                    signal.pause()
                os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(40, 4)), batch_size=4)
    trainer = fp.Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False, seed=1,
        enable_model_summary=False, callbacks=[Told(), fp.ModelCheckpoint(every_n_train_steps=2)])
    trainer.fit(Net(), data)
    """
)


def curve(bench: Bench, attempt: int) -> dict[str, str]:
    """The loss of each step, as written by TRAINS."""
    return dict(re.findall(r"^(\d+) (\S+)$", bench.output(attempt=attempt), re.MULTILINE))


@pytest.mark.slow
def test_a_trainer_that_says_nothing_of_it_continues_from_its_newest_checkpoint(bench: Bench):
    bench.program("")
    (bench.directory / "trainer" / "task.py").write_text(TRAINS)
    bench.submit(args=(str(bench.directory), "process"))
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    first, second = curve(bench, 1), curve(bench, 2)
    begun = min(map(int, second))
    assert begun in (
        3,
        5,
    )  # after the checkpoint of step 2, or of step 4 if that was complete when the process was killed
    assert list(second) == [str(step) for step in range(begun, 11)]
    both = first.keys() & second.keys()
    assert both
    assert [first[step] for step in both] == [second[step] for step in both]  # the same loss, to the last bit
    assert any((bench.directory / "out").rglob("meta.json"))
    assert not (bench.directory / "runs").exists()


@pytest.mark.slow
def test_the_machine_is_started_anew_in_the_middle_and_the_daemon_brings_the_job_back(bench: Bench):
    bench.program("")
    (bench.directory / "trainer" / "task.py").write_text(TRAINS)
    bench.submit(args=(str(bench.directory), "nobody"))
    until(lambda: any((bench.directory / "out").glob("checkpoints/*.ckpt/meta.json")))
    owner = bench.jobs.store.find("my_job").owner
    processes = [process.pid for process in bench.jobs.store.processes("my_job")]
    for pid in (owner["pid"], *processes):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: all(map(gone, (owner["pid"], *processes))))
    bench.jobs.store.own("my_job", {**owner, "pid": os.getpid(), "boot": "the one before"})
    shutil.rmtree(bench.jobs.home.root / "unpacked")  # its files had not reached the disk
    daemon = subprocess.Popen([sys.executable, "-m", "footplate", "jobs", "daemon"], stdout=subprocess.DEVNULL)
    try:
        bench.is_in(State.SUCCEEDED)
    finally:
        daemon.terminate()
        assert daemon.wait() == 0
    assert bench.jobs.store.transitions("my_job")[3].cause == "the machine was restarted"
    first, second = curve(bench, 1), curve(bench, 2)
    assert list(second) == [str(step) for step in range(min(map(int, second)), 11)]
    assert min(map(int, second)) > 2
    assert all(first[step] == second[step] for step in first.keys() & second.keys())


def test_the_processes_of_a_job_whose_machine_was_declared_lost_end_when_it_is_back(bench: Bench):
    bench.program("(place / 'pid').write_text(str(os.getpid())); time.sleep(600)")
    bench.submit()
    bench.is_in(State.RUNNING)
    until(lambda: (bench.directory / "pid").exists() and (bench.directory / "pid").read_text())
    supervisor = bench.jobs.store.find("my_job").owner
    store = bench.jobs.store
    assert store.move("my_job", State.RUNNING, State.CANCELLING, 1.0)
    assert store.move("my_job", State.CANCELLING, State.CANCELLED, 1.0, ended=1.0, owner=None)
    until(lambda: not Identity.from_dict(supervisor).alive())  # pyright: ignore[reportOptionalMemberAccess]
    assert not Path("/proc", (bench.directory / "pid").read_text()).exists()
    assert bench.states()[-1] == "CANCELLED"


@pytest.mark.parametrize("wrong", ["ignored module", "link that leads out", "requirement of this machine", "fifo"])
def test_what_a_submission_refuses_of_a_package_a_dry_run_refuses_too(bench: Bench, wrong: str):
    bench.program("")
    package = bench.directory / "trainer"
    match wrong:
        case "ignored module":
            (package / ".gitignore").write_text("task.py\n")
        case "link that leads out":
            (package / "data").symlink_to("/etc/hostname")
        case "requirement of this machine":
            (bench.directory / "requirements.txt").write_text("-e ../lib\n")
        case "fifo":
            os.mkfifo(package / "pipe")
    with pytest.raises(PackageError) as submitted:
        bench.submit()
    job = resolve(draft(parse(""), {"module-name": "trainer.task", "region": "us-central1"}, (), "my_job"))
    with pytest.raises(PackageError) as rehearsed:
        dry_run(PlannedJob(job, package))
    assert str(rehearsed.value) == str(submitted.value)


def test_the_variables_that_a_user_gives_reach_the_program_and_no_store_or_log(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    bench.program(
        'print(os.environ["LEVEL"], os.environ["MY_TOKEN"], len(os.environ["HF_TOKEN"])); sys.exit(attempt % 2)'
    )
    monkeypatch.setenv("HF_TOKEN", "the shell's")
    monkeypatch.setenv("MY_TOKEN", "a-secret-of-mine")
    argv = ["my_job", "--package-path", "trainer", "--module-name", "trainer.task"]
    argv += ["--env", "MY_TOKEN", "--env", "LEVEL=a=b", "--env", "HF_TOKEN=given"]
    assert jobs_submit.run(jobs_submit.parser().parse_args(argv), []) == 0
    assert bench.jobs.wait("my_job").attempt == 2
    assert bench.output() == "a=b [hidden] 5\n"
    files = {
        path.name for path in bench.jobs.home.root.rglob("*") if path.is_file() and b"a-secret" in path.read_bytes()
    }
    assert files == {"given.json"}
    assert (bench.jobs.home.job("my_job") / "given.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--env", "a-b=hush"], "expected NAME=VALUE or NAME"),
        (["--env", "=hush"], "expected NAME=VALUE or NAME"),
        (["--env", "RANK=hush"], "RANK: Footplate sets this variable"),
        (["--env", "FOOTPLATE_JOB_ID=hush"], "FOOTPLATE_JOB_ID: Footplate sets"),
        (["--env", "A=hush", "--env", "A=hush"], "A: given twice"),
        (["--env", "NOBODY_HAS_SET_THIS"], "NOBODY_HAS_SET_THIS: the variable isn't set here"),
        (["--env", "A=hush", "--backend", "ray"], "on this machine"),
    ],
)
def test_variables_that_cannot_be_given(bench: Bench, words: list[str], said: str):
    bench.program("")
    argv = ["my_job", "--package-path", "trainer", "--module-name", "trainer.task", *words, "--dry-run"]
    with pytest.raises(ConfigError) as refused:
        jobs_submit.run(jobs_submit.parser().parse_args(argv), [])
    assert said in str(refused.value)
    assert "hush" not in str(refused.value)


LEAVER = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (place / "draft").write_text(str(child.pid))
    (place / "draft").rename(place / "child")
    """


def test_a_child_in_a_session_of_its_own_ends_with_the_job(bench: Bench):
    bench.program(LEAVER)
    bench.submit()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    assert Identity.of(int((bench.directory / "child").read_text())) is None


def test_a_child_in_a_session_of_its_own_ends_with_a_lost_supervisor(bench: Bench):
    bench.program(LEAVER + "\n    time.sleep(600 if attempt == 1 else 0)")
    bench.submit()
    child = int(bench.there("child").read_text())
    bench.is_in(State.RUNNING)
    owner = bench.supervisor()
    os.kill(owner, signal.SIGKILL)
    until(lambda: Identity.of(owner) is None)
    assert bench.jobs.wait("my_job").losses == 1
    assert Identity.of(child) is None


def test_a_job_that_a_job_has_submitted_goes_on_after_it(bench: Bench):
    bench.program(
        """
        import subprocess
        if sys.argv[1:2] == ["inner"]:
            until_there("outer is over")
        else:
            command = [sys.executable, "-m", "footplate", "jobs", "submit", "training", "inner_job"]
            command += ["--package-path", "trainer", "--module-name", "trainer.task", "--", "inner"]
            home = os.environ | {"FOOTPLATE_HOME": str(place.parent / "home"), "FOOTPLATE_CPUS": "64"}
            subprocess.run(command, env=home, check=True)
        """
    )
    bench.submit()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    (bench.directory / "outer is over").touch()
    assert bench.jobs.wait("inner_job").state == State.SUCCEEDED
    assert bench.jobs.store.find("inner_job").attempt == 1
