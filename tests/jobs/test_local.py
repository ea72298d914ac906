"""Small parts of local jobs: process identity, lock holders, and a job's share of machine and shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.errors import ConfigError
from footplate.jobs import process_env
from footplate.jobs.backends.local import machine
from footplate.jobs.execution import Execution, Role
from footplate.jobs.home import Home
from footplate.jobs.scheduling import Resources
from footplate.jobs.spec.draft import draft
from footplate.jobs.spec.resolving import resolve
from footplate.jobs.spec.yamlfile import parse
from footplate.jobs.supervision.identity import Identity, end_groups
from footplate.jobs.supervision.locks import Held, held
from footplate.training import job


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"], start_new_session=True)


def test_a_process_is_known_while_it_lives_and_not_when_it_waits_to_be_reaped():
    process = sleeper()
    known = Identity.of(process.pid)
    assert known is not None
    assert known.alive()
    assert Identity.from_dict(known.to_dict()) == known
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not known.alive()
    process.wait()
    assert not known.alive()


def test_another_process_of_the_same_number_or_of_another_boot_is_another_and_is_spared():
    process = sleeper()
    known = Identity.of(process.pid)
    assert known is not None
    for stranger in (replace(known, began=known.began - 1), replace(known, boot="another")):
        assert not stranger.alive()
        end_groups([stranger])
        assert process.poll() is None
    end_groups([known], patience_s=0.0)
    assert process.wait() == -signal.SIGKILL


def test_a_lock_is_held_by_one_process_and_dies_with_it(tmp_path: Path):
    script = "import sys, time; from pathlib import Path; from footplate.jobs.supervision.locks import held\n"
    script += "with held(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "lock")], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(Held), held(tmp_path / "lock", 0.05):
        pass
    holder.kill()
    holder.wait()
    with held(tmp_path / "lock", 30):
        pass
    holder.stdout.close()


def test_what_a_shell_has_and_a_job_gets():
    environ = {
        "PATH": "/bin", "LC_ALL": "C", "OMP_NUM_THREADS": "2", "AWS_REGION": "eu", "AWS_SECRET_ACCESS_KEY": "s",
        "HF_TOKEN": "s",
        "GITHUB_TOKEN": "s", "FOOTPLATE_TOKEN": "s", "FOOTPLATE_STORE": "s", "PIP_INDEX_URL": "https://me:s@host/simple",
        "UV_INDEX_URL": "https://token@host/simple", "HTTPS_PROXY": "http://me:m/i@ne@proxy:3128",
        "MLFLOW_TRACKING_URI": "http://host:5000", "SSH_AUTH_SOCK": "x", "DBUS_SESSION_BUS_ADDRESS": "x",
    }  # fmt: skip
    assert process_env.lasting(environ).keys() == {
        "PATH", "LC_ALL", "OMP_NUM_THREADS", "AWS_REGION", "MLFLOW_TRACKING_URI",
    }  # fmt: skip
    assert process_env.credentials(environ).keys() == {
        "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PIP_INDEX_URL", "UV_INDEX_URL", "HTTPS_PROXY",
    }  # fmt: skip


@given(st.dictionaries(st.text(), st.text()))
def test_nothing_that_looks_like_a_secret_is_written_down(environ: dict[str, str]):
    secret = {f"AWS_{name}_TOKEN": value for name, value in environ.items()}
    assert not process_env.lasting(secret)


def test_devices_are_dealt_out_and_shared_when_there_are_too_few():
    roles = [Role("master", 1, gpus=2), Role("worker", 2, gpus=2), Role("parameter_server", 1)]
    assert list(machine.share_devices([0, 1, 2, 3, 4, 5], roles)) == [(0, 1), (2, 3), (4, 5), ()]
    assert list(machine.share_devices([4, 5, 6], roles)) == [(4, 5), (6,), (4,), ()]
    assert list(machine.share_devices([], roles)) == [(), (), (), ()]


@given(st.integers(0, 8), st.sets(st.integers(0, 7)), st.integers(0, 8))
def test_devices_that_somebody_has_are_not_given_away(count: int, taken: set[int], there: int):
    chosen = machine.choose_devices(count, taken, Resources(gpus=there))
    assert len(chosen) == min(count, len(set(range(there)) - taken))
    assert not taken & set(chosen)


def test_how_many_cores_jobs_may_take_can_be_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOOTPLATE_CPUS", "7.5")
    assert machine.resources().cpus == 7.5
    for wrong in ("nan", "inf", "0", "-1"):
        monkeypatch.setenv("FOOTPLATE_CPUS", wrong)
        with pytest.raises(ConfigError, match="expected the number of cores"):
            machine.resources()
    monkeypatch.setenv("FOOTPLATE_CPUS", "many")
    with pytest.raises(ConfigError, match='FOOTPLATE_CPUS="many": expected the number of cores'):
        machine.resources()


def test_a_job_that_names_no_machine_is_charged_for_little():
    def charge(text: str) -> Resources:
        return machine.needs(resolve(draft(parse(text), {"module-name": "trainer.task"}, (), "my_job")))

    assert charge("") == charge("trainingInput: {scaleTier: BASIC}") == Resources(cpus=1, memory_gb=2)
    assert charge("trainingInput: {masterType: n1-standard-4}") == Resources(cpus=4, memory_gb=15)


def test_how_much_memory_jobs_may_take_can_be_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOOTPLATE_MEMORY", "7.5")
    assert machine.resources().memory_gb == 7.5
    for wrong in ("nan", "inf", "0", "-1", "8GB"):
        monkeypatch.setenv("FOOTPLATE_MEMORY", wrong)
        with pytest.raises(ConfigError, match=f'FOOTPLATE_MEMORY="{wrong}": expected the GB'):
            machine.resources()


@pytest.mark.parametrize(
    ("given_dir", "wanted"),
    [
        ("out", "/home/me/out"),
        ("/abs/out", "/abs/out"),
        ("file:///abs/out", "/abs/out"),
        ("gs://bucket/out", "gs://bucket/out"),
    ],
)
def test_a_job_directory_is_where_the_job_was_submitted(given_dir: str, wanted: str):
    flags = {"module-name": "trainer.task", "region": "us-central1", "job-dir": given_dir, "max-running-time": "2h"}
    resolved = resolve(draft(None, flags, ("--epochs", "2"), "my_job"))
    plan = Execution.of(resolved, "digest", Path("/home/me"), {"project": "p"})
    assert plan.arguments == ("-m", "trainer.task", "--epochs", "2", "--job-dir", wanted)
    assert (plan.job_dir, plan.max_running_time_s) == (wanted, 7200.0)
    assert Execution.from_dict(plan.to_dict()) == plan


def test_a_home_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOOTPLATE_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ConfigError, match="Set FOOTPLATE_HOME to another folder"):
        Home.from_env()
    monkeypatch.setenv("FOOTPLATE_HOME", "~nobody_of_this_name/x")
    with pytest.raises(ConfigError, match="FOOTPLATE_HOME=~nobody_of_this_name/x: this machine has no such user"):
        Home.from_env()


def test_a_trainer_outside_a_job_takes_nothing_from_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FOOTPLATE_JOB_ID", raising=False)
    monkeypatch.setenv("FOOTPLATE_JOB_DIR", "/somewhere")
    monkeypatch.setenv("FOOTPLATE_JOB_ATTEMPT", "3")
    assert (job.next_fit(), job.begun_again(), job.directory()) == ((None, None), False, None)


def test_a_trainer_in_a_job_knows_its_calls_of_fit_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOOTPLATE_JOB_ID", "my_job-1")
    monkeypatch.setenv("FOOTPLATE_JOB_DIR", "/somewhere")
    monkeypatch.setenv("FOOTPLATE_JOB_ATTEMPT", "1")
    one, two = job.next_fit(), job.next_fit()
    assert one != two
    assert not job.begun_again()
    assert job.directory() == Path("/somewhere")
    monkeypatch.setenv("FOOTPLATE_JOB_ATTEMPT", "2")
    assert job.begun_again()


def test_a_run_in_a_job_with_a_bucket_is_on_this_machine_and_its_checkpoints_are_in_the_bucket(
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in {"ID": "my_job-1", "NAME": "my_job", "DIR": "gs://bucket/somewhere/"}.items():
        monkeypatch.setenv(f"FOOTPLATE_JOB_{name}", value)
    assert job.directory() == Path("runs/my_job")
    for own in ("runs/my_job", Path("runs/my_job").absolute()):  # as a rank is told it
        assert str(job.checkpoints(Path(own))) == "gs://bucket/somewhere/checkpoints"
    assert job.checkpoints(Path("another")) == Path("another/checkpoints")  # which the user has named
    monkeypatch.setenv("FOOTPLATE_JOB_DIR", "/somewhere")
    assert job.checkpoints(Path("/somewhere")) == Path("/somewhere/checkpoints")
