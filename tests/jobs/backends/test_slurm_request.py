"""The request to Slurm, what its refusals mean, and the files of an attempt: pure parts of the backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from footplate.jobs.backends.slurm import attempt_files, request
from footplate.jobs.backends.slurm.client import Away, JobInfo, Refused, _job, _refusal
from footplate.jobs.backends.slurm.entrypoint import variables_of_ranks
from footplate.jobs.cluster_env import ReplicaProcess
from footplate.jobs.spec.draft import draft
from footplate.jobs.spec.resolving import ResolvedJob, resolve
from footplate.jobs.spec.yamlfile import parse
from footplate.jobs.translate.common import Untranslatable, refuse_without_package

T4 = {"acceleratorConfig": {"count": 4, "type": "NVIDIA_TESLA_T4"}}
ALONE = {"scaleTier": "CUSTOM", "masterType": "n1-standard-16", "masterConfig": T4}
SEVERAL = {**ALONE, "workerCount": 2, "workerType": "n1-standard-16", "workerConfig": T4}
SERVERS = {**SEVERAL, "parameterServerCount": 1, "parameterServerType": "n1-standard-4"}


def _resolved(flags: dict[str, str] | None = None, **spec: Any) -> ResolvedJob:
    flags = {"module-name": "trainer.task", "region": "us-central1"} if flags is None else flags
    return resolve(draft(parse(json.dumps({"trainingInput": spec})), flags, (), "my_job"))


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ({}, ["--ntasks=1"]),
        (
            {"scaleTier": "CUSTOM", "masterType": "n1-standard-4", "workerCount": 1, "workerType": "n1-standard-8"},
            ["--ntasks=2", "--cpus-per-task=8", "--mem-per-cpu=3840M"],
        ),
        (
            SEVERAL,
            ["--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=16", "--mem=61440M", "--gpus-per-node=4"],
        ),
    ],
)
def test_a_spec_asks_for_equal_tasks_with_a_node_for_each_that_has_gpus(spec: dict[str, Any], options: list[str]):
    assert request.options(_resolved(**spec), {}) == options


def test_the_users_options_come_last_so_that_they_override():
    place = {"partition": "gpu", "time": "1:00:00", "sbatch_args": "--mem=0 --comment='a b'"}
    assert request.options(_resolved(), place) == [
        "--ntasks=1", "--partition=gpu", "--time=1:00:00", "--mem=0", "--comment=a b",
    ]  # fmt: skip


@pytest.mark.parametrize(("spec", "ranks"), [({}, 1), (ALONE, 1), (SEVERAL, 4), (SERVERS, 1)])
def test_gpus_have_ranks_in_a_job_of_several_machines_without_servers(spec: dict[str, Any], ranks: int):
    assert request.ranks_of_each(_resolved(**spec)) == ranks


def test_a_replica_that_may_share_a_node_keeps_its_variables_and_one_outside_of_the_world_too():
    worker = ReplicaProcess("worker", 0, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    server = ReplicaProcess("parameter_server", 0, {"TF_CONFIG": "{}"})
    assert variables_of_ranks(worker, 0) == [worker.env]
    assert variables_of_ranks(server, 4) == [server.env]
    assert [each["LOCAL_RANK"] for each in variables_of_ranks(worker, 1)] == ["0"]


def test_a_job_that_slurm_cannot_run_is_refused_with_all_reasons():
    image = {"imageUri": "gcr.io/me/mine"}
    resolved = _resolved({"region": "us-central1"}, scaleTier="CUSTOM", masterType="n1-standard-4", masterConfig=image)
    with pytest.raises(Untranslatable, match="It has no module, and on Slurm's nodes jobs run as Python packages"):
        refuse_without_package(resolved, "Slurm")


@pytest.mark.parametrize(
    ("errors", "error"),
    [
        (
            "sbatch: error: invalid partition specified: none\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            "--partition none: Invalid partition name specified. `sinfo -s` lists what there is.",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n",
            "--account none: Invalid account or account/partition combination specified. "
            "`sacctmgr show associations user=$USER` lists what there is.",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid qos specification\n",
            "no --qos was given: Invalid qos specification. `sacctmgr show qos` lists what there is.",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)\n",
            "--time 9-0: Requested time limit is invalid (missing or exceeds some limit). "
            "`sinfo -o '%P %l'` lists what there is.",
        ),
    ],
)
def test_a_refusal_names_the_field_its_value_and_where_to_look(errors: str, error: str):
    place = ["--partition=none", "--account=none", "--time=9-0"]
    refusal = _refusal(errors, place)
    assert isinstance(refusal, Refused)
    assert str(refusal) == error


@pytest.mark.parametrize(
    "errors",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n",
        "sbatch: error: Batch job submission failed: Slurm backup controller in standby mode\n",
    ],
)
def test_a_controller_that_is_away_refuses_nothing(errors: str):
    assert isinstance(_refusal(errors, ["--partition=gpu"]), Away)


def test_a_line_of_squeue_is_a_job():
    columns = ("4711", "PENDING", "2", "", "launch failed requeued held")
    line = "".join(text.ljust(width) for text, width in zip(columns, (20, 20, 12, 200, 60), strict=True))
    assert _job(line) == JobInfo(4711, "PENDING", 2, "launch failed requeued held", "")


def test_the_first_of_two_slurm_jobs_claims_an_attempt_for_good(tmp_path: Path):
    assert attempt_files.claimed(tmp_path) is None
    assert attempt_files.claim(tmp_path, 7)
    assert not attempt_files.claim(tmp_path, 8)
    assert attempt_files.claim(tmp_path, 7)
    assert attempt_files.claimed(tmp_path) == 7
    assert [path.name for path in tmp_path.iterdir()] == [attempt_files.CLAIM]


def test_an_event_is_read_once_and_not_before_its_line_is_complete(tmp_path: Path):
    reader = attempt_files.LineReader(tmp_path / attempt_files.EVENTS)
    assert reader.read() == []
    attempt_files.add_event(tmp_path, "start", job=7)
    with (tmp_path / attempt_files.EVENTS).open("a") as file:
        file.write('{"event": "told')
        file.flush()
        assert reader.read() == [{"event": "start", "job": 7}]
        file.write('"}\n')
    assert reader.read() == [{"event": "told"}]
    assert reader.read() == []
