"""`footplate run` inside an allocation of Slurm: its nodes, ranks and address follow from Slurm's variables."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster

from footplate.core.errors import ConfigError
from footplate.launch.slurm_allocation import Allocation, Meeting, allocation, first_host, meeting_file

STEP = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_ON_NODE": "64",
    "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "gpu[07-10]",
}  # fmt: skip
BATCH = {
    "SLURM_JOB_ID": "12", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_ON_NODE": "8",
}  # fmt: skip

TELLS = """
import os
from pathlib import Path
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "FOOTPLATE_JOB_ATTEMPT")
Path(__file__).with_name("rank-" + os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in names))
"""


def test_a_step_has_its_own_nodes_and_a_rank_for_each_gpu():
    step = allocation(STEP, "footplate run train.py")
    assert step == Allocation(12, 3, 1, nodes=2, node_rank=1, per_node=4, first_node="gpu07")
    assert step.job_variables == {"FOOTPLATE_JOB_ID": "slurm-12.3", "FOOTPLATE_JOB_ATTEMPT": "1"}
    assert allocation({**STEP, "SLURM_STEP_ID": "4"}, "").port != step.port  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    ("variables", "processes"),
    [
        ({}, 8),
        ({"SLURM_CPUS_PER_TASK": "8"}, 1),
        ({"SLURM_NTASKS": "2"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "4", "SLURM_NTASKS": "4"}, 4),
        ({"SLURM_NTASKS": "1", "SLURM_CPUS_PER_TASK": "2"}, 4),
        ({"SLURM_NTASKS": "2", "SLURM_GPUS_ON_NODE": "3"}, 3),
    ],
)
def test_without_gpus_there_is_a_process_for_each_task_or_for_its_cores(variables, processes):
    granted = allocation({**BATCH, **variables}, "")
    assert granted is not None
    assert (granted.nodes, granted.node_rank, granted.per_node) == (1, 0, processes)


def test_a_requeued_job_is_a_later_attempt_of_the_same_job():
    granted = allocation({**BATCH, "SLURM_RESTART_COUNT": "2"}, "")
    assert granted is not None
    assert granted.job_variables == {"FOOTPLATE_JOB_ID": "slurm-12", "FOOTPLATE_JOB_ATTEMPT": "3"}


def test_outside_of_an_allocation_and_in_a_job_of_ours_nothing_changes():
    assert allocation({}, "") is None
    assert allocation({"SLURM_JOB_ID": "12", "SLURMD_NODENAME": "n1"}, "") is None


def test_a_command_that_runs_too_often_or_not_everywhere_is_refused_with_the_right_one():
    with pytest.raises(ConfigError, match=r"8 tasks on 2 nodes.*: srun --ntasks-per-node=1 footplate run train\.py$"):
        allocation({**STEP, "SLURM_STEP_NUM_TASKS": "8"}, "footplate run train.py")
    with pytest.raises(ConfigError, match=r"has 2 nodes.*: srun --ntasks-per-node=1 footplate run train\.py$"):
        allocation({**BATCH, "SLURM_NNODES": "2"}, "footplate run train.py")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1"),
        ("gpu[003,005-007],login", "gpu003"),
        ("a,b[1-2]", "a"),
        ("r[1-2]n[08-09]", "r1n08"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_host(nodes) == first


def test_a_meeting_point_is_for_one_step_and_only_for_its_user(tmp_path: Path):
    environ = {**STEP, "FOOTPLATE_HOME": str(tmp_path), "SLURM_STEP_LAUNCHER_PORT": "40000"}
    path = meeting_file(environ)
    meeting = Meeting.new("127.0.0.1")
    meeting.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Meeting.read(meeting_file(dict(environ))) == meeting
    for name, value in {"SLURM_RESTART_COUNT": "1", "SLURM_STEP_ID": "4", "SLURM_STEP_LAUNCHER_PORT": "40001"}.items():
        assert meeting_file({**environ, name: value}) != path


def _script(folder: Path) -> str:
    (folder / "train.py").write_text(TELLS)
    root = Path(__file__).parents[2]
    return f"env PYTHONPATH={root} FOOTPLATE_HOME={folder / 'home'} {shlex.quote(sys.executable)} -m footplate run"


def _ranks(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("rank-*"))]


@pytest.mark.engine
@pytest.mark.slow
def test_srun_starts_the_ranks_of_two_nodes_without_arguments(slurm: SlurmCluster, tmp_path: Path):
    command = f"srun --nodes=2 --ntasks-per-node=1 --gpus-per-node=2 {_script(tmp_path)} {tmp_path}/train.py"
    output = slurm.run(*shlex.split(command), PATH=os.environ["PATH"])
    assert _ranks(tmp_path) == [f"{rank} 4 {rank % 2} 2 {rank // 2} 1" for rank in range(4)], output
    assert list((tmp_path / "home/slurm").iterdir()) == []


@pytest.mark.engine
@pytest.mark.slow
def test_a_batch_script_on_one_node_starts_its_ranks_and_a_requeue_is_the_next_attempt(
    slurm: SlurmCluster, tmp_path: Path
):
    log = tmp_path / "log"
    wait = f"until [ -e {tmp_path}/go ]; do sleep 0.1; done"
    submit = ["sbatch", "--parsable", "--gpus-per-node=2", "--requeue", f"--output={log}", "--open-mode=append"]
    job = slurm.run(*submit, f"--wrap={_script(tmp_path)} {tmp_path}/train.py; {wait}").strip()
    slurm.wait(lambda: len(_ranks(tmp_path)) == 2)
    slurm.wait(lambda: _ranks(tmp_path) == ["0 2 0 2 0 1", "1 2 1 2 0 1"])
    slurm.run("scontrol", "requeue", job)
    slurm.wait(lambda: _ranks(tmp_path) == ["0 2 0 2 0 2", "1 2 1 2 0 2"])
    (tmp_path / "go").touch()
    slurm.wait(lambda: "COMPLETED" in slurm.run("squeue", "--noheader", "--states=all", f"--job={job}", "--format=%T"))
