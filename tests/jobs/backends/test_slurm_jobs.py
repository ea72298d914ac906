"""Cases that only Slurm has, on its real daemons: requeues, time limits, submissions that nobody saw end, full clusters."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from footplate.core.errors import ConfigError
from footplate.jobs.states import State
from footplate.jobs.supervision.identity import Identity
from jobs.backends.slurm_backend import Slurm
from jobs.conftest import NET, Bench, until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.parametrize("place", ["slurm"], indirect=True)]

TWO_WITH_GPUS = """
trainingInput:
  scaleTier: CUSTOM
  masterType: n1-standard-8
  masterConfig:
    acceleratorConfig: {count: 2, type: NVIDIA_TESLA_T4}
  workerCount: 1
  workerType: n1-standard-8
  workerConfig:
    acceleratorConfig: {count: 2, type: NVIDIA_TESLA_T4}
"""
# Takes all cores of all nodes.
FOUR = """
trainingInput:
  scaleTier: CUSTOM
  masterType: n1-standard-8
  workerCount: 3
  workerType: n1-standard-8
"""
# Saves on SIGTERM, and ends when there is a file `go`. scancel may send SIGTERM to the program as well as to the replica,
# which passes it on.
SAVES = """
def told(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("saving", attempt, flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, told)
print("begins", attempt, flush=True)
(place / f"ready-{attempt}").touch()
until_there("go")
"""


def _states(bench: Bench) -> list[str]:
    return [f"{transition.target} {transition.attempt}" for transition in bench.jobs.store.transitions("my_job")]


def _slurm_state(place: Slurm, bench: Bench) -> str:
    return job.state if (job := place.job(bench)) else ""


def test_before_the_time_limit_the_job_saves_and_slurm_requeues_it(bench: Bench, place: Slurm):
    bench.program(SAVES)
    bench.submit()
    bench.there("ready-1")
    job = until(lambda: place.job(bench))
    # Slurm sends this itself, 120 s before the limit. It looks at limits twice a minute: see benchmarks/slurm.py.
    place.cluster.run("scancel", "--signal=USR1", "--batch", str(job.id))
    until(lambda: place.hurry(bench) or (bench.directory / "ready-2").exists())
    (bench.directory / "go").touch()
    ended = bench.jobs.wait("my_job")
    causes = [transition.cause for transition in bench.jobs.store.transitions("my_job")]
    assert (ended.state, ended.attempt, ended.failures, ended.losses) == (State.SUCCEEDED, 2, 0, 0), causes
    assert bench.output() == "begins 1\nsaving 1\n"
    assert bench.output(attempt=2) == "begins 2\n"
    assert _states(bench) == ["QUEUED 0", "PREPARING 1", "RUNNING 1", "PREPARING 2", "RUNNING 2", "SUCCEEDED 2"]
    causes = [transition.cause for transition in bench.jobs.store.transitions("my_job")]
    assert causes[3] == f"Slurm has requeued it as job {job.id}: its time limit was near"
    until(lambda: _slurm_state(place, bench) == "COMPLETED")
    assert [(each.id, each.restarts) for each in place.client.jobs(f"{ended.id}-1")] == [(job.id, 1)]


def test_a_replica_that_slurm_asks_to_end_before_the_entry_point_is_no_loss(bench: Bench, place: Slurm):
    bench.program(SAVES)
    bench.submit()
    bench.there("ready-1")
    job = until(lambda: place.job(bench))
    # Slurm sends SIGTERM to the step first, then to the batch script: here, when the program has already saved and ended.
    place.cluster.run("scancel", "--signal=TERM", f"{job.id}.0")
    until(lambda: "saving 1" in bench.output(attempt=1))
    time.sleep(0.5)
    place.cluster.run("scontrol", "requeue", str(job.id))
    until(lambda: place.hurry(bench) or (bench.directory / "ready-2").exists())
    (bench.directory / "go").touch()
    ended = bench.jobs.wait("my_job")
    causes = [transition.cause for transition in bench.jobs.store.transitions("my_job")]
    assert (ended.state, ended.attempt, ended.failures, ended.losses) == (State.SUCCEEDED, 2, 0, 0), causes


def test_a_replica_that_alone_gets_sigterm_is_lost(bench: Bench, place: Slurm):
    bench.program(SAVES)
    bench.submit()
    bench.there("ready-1")
    place.cluster.run("scancel", "--signal=TERM", f"{until(lambda: place.job(bench)).id}.0")
    until(lambda: place.hurry(bench) or (bench.directory / "ready-2").exists())
    (bench.directory / "go").touch()
    ended = bench.jobs.wait("my_job")
    causes = [transition.cause for transition in bench.jobs.store.transitions("my_job")]
    assert (ended.state, ended.attempt, ended.failures, ended.losses) == (State.SUCCEEDED, 2, 0, 1), causes


TRAINS = (
    NET
    + """
import os, signal, sys, time
from pathlib import Path
place, attempt, told = Path(sys.argv[1]), os.environ["FOOTPLATE_JOB_ATTEMPT"], []

class Told(fp.Callback):
    def on_train_start(self, trainer, pl_module):
        saves = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *args: (told.append(True), saves(*args)))
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        print(trainer.global_step, float(outputs).hex(), flush=True)
        if trainer.global_step == 5:
            (place / "at-5").touch()
        while trainer.global_step == 5 and attempt == "1" and not told:
            time.sleep(0.05)

torch.manual_seed(0)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(80, 4)), batch_size=4)
trainer = fp.Trainer(accelerator="cpu", max_epochs=1, logger=False, seed=1,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[Told(), fp.ModelCheckpoint(save_last=True)])
trainer.fit(Net(), data)
"""
)


def test_a_preempted_trainer_resumes_by_itself_where_it_saved(bench: Bench, place: Slurm):
    bench.program("")
    (bench.directory / "trainer" / "task.py").write_text(TRAINS)
    bench.submit(args=(str(bench.directory),), text=FOUR.replace("workerCount: 3", "workerCount: 0"))
    bench.there("at-5")
    bench.is_in(State.RUNNING)
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null"]
    urgent_job = place.cluster.run(*urgent, "--wrap=sleep 600").strip()
    until(lambda: bench.jobs.find("my_job").cause.startswith("waits in Slurm's queue as job"))
    assert bench.jobs.store.state("my_job") == State.PREPARING
    place.cluster.run("scancel", urgent_job)
    until(lambda: place.hurry(bench) or bench.jobs.store.state("my_job") == State.RUNNING)
    job = bench.jobs.wait("my_job")
    causes = [transition.cause for transition in bench.jobs.store.transitions("my_job")]
    assert (job.state, job.attempt, job.failures, job.losses) == (State.SUCCEEDED, 2, 0, 0), causes
    first, second = ([line.split()[0] for line in bench.output(attempt=attempt).splitlines()] for attempt in (1, 2))
    steps = [int(step) for step in (*first, *second) if step.isdigit()]
    assert steps == list(range(1, 21))
    assert any(step.isdigit() for step in second)


def test_each_gpu_of_a_node_has_a_rank_and_one_that_fails_ends_the_others(bench: Bench, place: Slurm):
    bench.program(
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "CUDA_VISIBLE_DEVICES")
        print(*(os.environ[name] for name in names), flush=True)
        (place / f"rank-{os.environ['RANK']}-{attempt}").touch()
        for rank in range(6):
            until_there(f"rank-{rank}-{attempt}")
        if attempt == 1 and os.environ["RANK"] == "5":
            raise ValueError("only here")
        if attempt == 1:
            time.sleep(600)
        """
    )
    # Four cores each: both tasks would fit on one node.
    bench.options = {"sbatch-args": "--gpus-per-node=3 --cpus-per-task=4"}
    bench.submit(text=TWO_WITH_GPUS)
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt, job.failures) == (State.SUCCEEDED, 2, 1), job.cause
    for attempt in (1, 2):
        for node, who in enumerate(("master-0", "worker-0")):
            lines = bench.output(attempt=attempt, who=who).splitlines()
            first = 3 * node
            expected = [
                f"{first} 6 0 3 {node} 0,1,2",
                f"[rank {first + 1}] {first + 1} 6 1 3 {node} 0,1,2",
                f"[rank {first + 2}] {first + 2} 6 2 3 {node} 0,1,2",
            ]
            assert sorted(line for line in lines if line.endswith("0,1,2")) == expected
    causes = [transition.cause for transition in bench.jobs.store.transitions("my_job")]
    assert any(cause.startswith("worker 0 ended with exit code 1: ValueError: only here") for cause in causes), causes


# Passes everything on to the real sbatch. The first submission does what {then} says.
SBATCH = """#!/bin/bash
case "$*" in *--parsable*) ;; *) exec {sbatch} "$@" ;; esac
if [ -e {mark} ]; then exec {sbatch} "$@"; fi
touch {mark}
{then}
"""


def _first_submission(bench: Bench, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    sbatch = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    folder = bench.directory / "bin"
    folder.mkdir()
    program = folder / "sbatch"
    program.write_text(SBATCH.format(sbatch=sbatch, mark=folder / "mark", then=then.format(sbatch=sbatch)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


COUNTS = """
with open(place / "starts", "a") as file:
    file.write(os.environ["SLURM_JOB_ID"] + "\\n")
until_there("go")
"""


def test_a_supervisor_that_dies_before_it_knows_the_id_submits_no_second_job(
    bench: Bench, place: Slurm, monkeypatch: pytest.MonkeyPatch
):
    _first_submission(bench, monkeypatch, '{sbatch} "$@"; kill -9 $PPID')
    bench.program(COUNTS)
    bench.submit()
    bench.there("starts")
    killed = bench.supervisor()
    until(lambda: Identity.of(killed) is None)
    record = bench.jobs.home.attempt("my_job", 1) / "slurm.json"
    bench.jobs.reconcile()
    bench.is_in(State.RUNNING)
    (job,) = place.client.jobs(f"{bench.jobs.find('my_job').id}-1")
    until(lambda: json.loads(record.read_text())["job"] == job.id)
    (bench.directory / "go").touch()
    ended = bench.jobs.wait("my_job")
    assert (ended.state, ended.attempt, ended.losses) == (State.SUCCEEDED, 1, 0), ended.cause
    assert (bench.directory / "starts").read_text() == f"{job.id}\n"
    assert len(place.client.jobs(f"{ended.id}-1")) == 1


def test_a_job_that_slurm_has_twice_runs_once(bench: Bench, place: Slurm, monkeypatch: pytest.MonkeyPatch):
    # The supervisor hears of the second job only. The first one is the late request of an earlier try.
    _first_submission(bench, monkeypatch, '{sbatch} "$@" > /dev/null; {sbatch} "$@"')
    bench.program(COUNTS)
    bench.submit()
    bench.there("starts")
    bench.is_in(State.RUNNING)
    name = f"{bench.jobs.find('my_job').id}-1"
    until(lambda: [job.final for job in place.client.jobs(name)].count(True) == 1)
    (running,) = [job for job in place.client.jobs(name) if not job.final]
    (bench.directory / "go").touch()
    ended = bench.jobs.wait("my_job")
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 1), ended.cause
    assert (bench.directory / "starts").read_text() == f"{running.id}\n"


def test_slurms_controller_may_be_away_for_a_while(bench: Bench, place: Slurm):
    bench.program(SAVES)
    bench.submit("runs")
    bench.there("ready-1")
    bench.is_in(State.RUNNING, "runs")
    place.cluster.stop_controller()
    try:
        (bench.directory / "go").touch()
        # The verdict comes over the shared disk.
        assert bench.jobs.wait("runs").state == State.SUCCEEDED
    finally:
        place.cluster.start_controller()
        place.cluster.wait_for_nodes()
    bench.submit("later")
    assert bench.jobs.wait("later").state == State.SUCCEEDED


def test_a_waiting_job_says_why_and_can_be_cancelled(bench: Bench, place: Slurm):
    full = ["sbatch", "--parsable", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 600"]
    other = place.cluster.run(*full).strip()
    bench.program("")
    bench.submit(text=FOUR)
    until(lambda: bench.jobs.find("my_job").cause.endswith((": Resources", ": Priority")))
    job = until(lambda: place.job(bench))
    assert bench.jobs.find("my_job").cause.startswith(f"waits in Slurm's queue as job {job.id}: ")
    bench.jobs.cancel("my_job")
    assert bench.jobs.wait("my_job").state == State.CANCELLED
    assert bench.states() == ["QUEUED", "PREPARING", "CANCELLING", "CANCELLED"]
    assert _slurm_state(place, bench) == "CANCELLED"
    place.cluster.run("scancel", other)


def test_a_job_is_cancelled_while_slurm_holds_it_back_after_a_requeue(bench: Bench, place: Slurm):
    bench.program(SAVES)
    bench.submit()
    bench.there("ready-1")
    bench.is_in(State.RUNNING)
    job = until(lambda: place.job(bench))
    place.cluster.run("scontrol", "requeuehold", str(job.id))
    until(lambda: bench.jobs.find("my_job").attempt == 2)
    assert bench.jobs.store.state("my_job") == State.PREPARING
    until(lambda: "held" in bench.jobs.find("my_job").cause)
    bench.jobs.cancel("my_job")
    assert bench.jobs.wait("my_job").state == State.CANCELLED
    until(lambda: _slurm_state(place, bench) == "CANCELLED")
    assert bench.output() == "begins 1\nsaving 1\n"


def test_a_variable_of_the_command_reaches_the_program_and_no_file_of_slurm(
    bench: Bench, place: Slurm, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_TOKEN", "a-secret-of-mine")
    bench.program('print(os.environ["MY_TOKEN"] == "a-secret-of-mine", os.environ["MY_TOKEN"], flush=True)')
    submitted = subprocess.run(
        [sys.executable, "-m", "footplate", "jobs", "submit", "training", "my_job", "--backend", "slurm",
         "--package-path", "trainer", "--module-name", "trainer.task", "--job-dir", "out", "--env", "MY_TOKEN"],
        capture_output=True, text=True, cwd=bench.directory,
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stderr
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    assert bench.output() == "True [hidden]\n"
    state = place.cluster.conf.parent / "state"
    assert not any(b"a-secret-of-mine" in path.read_bytes() for path in state.rglob("*") if path.is_file())


def test_scancel_by_hand_ends_the_job(bench: Bench, place: Slurm):
    bench.program(SAVES)
    bench.submit()
    bench.there("ready-1")
    bench.is_in(State.RUNNING)
    job = until(lambda: place.job(bench))
    place.cluster.run("scancel", str(job.id))
    ended = bench.jobs.wait("my_job")
    assert (ended.state, ended.cause) == (State.FAILED, f"it was cancelled in Slurm, by scancel (job {job.id})")
    assert bench.output() == "begins 1\nsaving 1\n"


def test_a_lost_first_node_is_not_the_programs_fault(bench: Bench, place: Slurm):
    bench.program(SAVES)
    bench.submit(text=FOUR.replace("workerCount: 3", "workerCount: 1"))
    bench.there("ready-1")
    bench.is_in(State.RUNNING)
    job = until(lambda: place.job(bench))
    place.cluster.lose_node(place.cluster.run("scontrol", "show", "hostnames", job.nodes).split()[0])
    (bench.directory / "go").touch()
    until(lambda: place.hurry(bench) or (bench.directory / "ready-2").exists())
    ended = bench.jobs.wait("my_job")
    assert (ended.state, ended.attempt, ended.failures, ended.losses) == (State.SUCCEEDED, 2, 0, 0), ended.cause


def test_a_killed_entry_point_is_another_attempt(bench: Bench, place: Slurm):
    bench.program(
        """
        (place / f"ready-{attempt}").touch()
        if attempt == 1:
            time.sleep(600)
        """
    )
    bench.submit()
    bench.there("ready-1")
    bench.is_in(State.RUNNING)
    (pid,) = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"slurm.entrypoint" in path.read_bytes() and str(bench.directory.parent).encode() in path.read_bytes()
    ]
    os.kill(pid, signal.SIGKILL)
    ended = bench.jobs.wait("my_job")
    assert (ended.state, ended.attempt, ended.failures) == (State.SUCCEEDED, 2, 1), ended.cause


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"partition": "none"}, "--partition none: .*nvalid partition.*`sinfo -s`"),
        ({"time": "soon"}, "--time soon: Invalid --time specification"),
        ({"sbatch-args": "--constraint='a"}, r"--sbatch-args --constraint='a: No closing quotation"),
    ],
)
def test_what_slurm_refuses_is_refused_at_once_with_the_field(
    bench: Bench, place: Slurm, options: dict[str, str], error: str
):
    bench.program("")
    bench.options = options
    with pytest.raises(ConfigError, match=error):
        bench.submit()
    assert bench.jobs.store.list() == []


def test_a_job_that_no_node_can_ever_run_fails_with_the_options(bench: Bench, place: Slurm):
    bench.program("")
    bench.options = {"sbatch-args": "--mem=900G"}
    _, notice = bench.submit()
    asked = "the cluster has no nodes for --ntasks=1 --mem=900G (Requested node configuration is not available)"
    assert notice.startswith(f"Slurm can't place the job now: {asked}")
    job = bench.jobs.wait("my_job")
    assert job.state == State.FAILED
    assert job.cause.startswith(f"Slurm refuses it: {asked}")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"time": "5-00:00:00"}, r"PartitionTimeLimit \(its --time is more than the partition allows\)$"),
        (
            {"sbatch-args": "--nodes=9 --ntasks=9"},
            r"PartitionNodeLimit \(it needs more nodes than the partition allows\)$",
        ),
    ],
)
def test_what_slurm_never_grants_is_said_while_the_job_waits(
    bench: Bench, place: Slurm, options: dict[str, str], why: str
):
    bench.options = options
    bench.program("")
    bench.submit()
    until(lambda: re.search(why, bench.jobs.find("my_job").cause))
    bench.jobs.cancel("my_job")
    assert bench.jobs.wait("my_job").state == State.CANCELLED


def test_a_dry_run_prints_the_command_and_the_script(bench: Bench, place: Slurm, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SBATCH_PARTITION", "urgent")
    bench.program("")
    printed = subprocess.run(
        [sys.executable, "-m", "footplate", "jobs", "submit", "training", "my_job", "--backend", "slurm", "--dry-run",
         "--package-path", "trainer", "--module-name", "trainer.task", "--time", "2:00:00", "--format", "json",
         "--sbatch-args=--cpus-per-task=2"],
        capture_output=True, text=True, cwd=bench.directory,
    )  # fmt: skip
    assert printed.returncode == 0, printed.stderr
    request = json.loads(printed.stdout)
    folder = bench.jobs.home.attempt("my_job", 1)
    assert request["command"] == [
        "sbatch", "--job-name=my_job-TIME-1", "--comment=footplate my_job", f"--output={folder}/slurm.log",
        "--open-mode=append", f"--chdir={folder}", "--export=ALL", "--requeue", "--signal=B:USR1@120", "--ntasks=1",
        "--partition=urgent", "--time=2:00:00", "--cpus-per-task=2", f"{folder}/job.sh",
    ]  # fmt: skip
    assert request["script"].splitlines()[-1].endswith(f"-m footplate.jobs.backends.slurm.entrypoint {folder}")
    assert bench.jobs.store.list() == []
