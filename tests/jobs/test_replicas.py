"""Variables that tell replicas about each other, and programs that find their cluster by them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import template
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import free_port

from footplate.jobs.cluster_env import ReplicaProcess, processes, replica_ids
from footplate.jobs.spec.draft import draft
from footplate.jobs.spec.resolving import ResolvedJob, resolve
from footplate.jobs.spec.yamlfile import parse

EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTER = """
trainingInput:
  masterType: n1-standard-4
  workerType: n1-standard-4
  workerCount: {worker}
  parameterServerType: n1-standard-4
  parameterServerCount: {server}
  evaluatorType: n1-standard-4
  evaluatorCount: {evaluator}
  region: us-central1
  pythonModule: trainer.task
"""


def job(worker: int = 0, server: int = 0, evaluator: int = 0, **keys: str) -> ResolvedJob:
    text = CLUSTER.format(worker=worker, server=server, evaluator=evaluator)
    return resolve(draft(parse(text + "".join(f"  {key}: {value}\n" for key, value in keys.items())), name="my_job"))


def told(resolved: ResolvedJob, hosts: list[str] | None = None, attempt: int = 0) -> list[ReplicaProcess]:
    places = [f"{(hosts or ['h'] * 99)[index]}:{2000 + index}" for index, _ in enumerate(replica_ids(resolved))]
    return processes(resolved, places, f"{places[0].partition(':')[0]}:1999", attempt, "gs://bucket/job")


def test_tf_config_is_what_ai_platform_wrote():
    replicas = told(job(worker=2, server=1, evaluator=1, runtimeVersion="2.11"))
    assert [(replica.role, replica.index) for replica in replicas] == [
        ("master", 0), ("worker", 0), ("worker", 1), ("parameter_server", 0), ("evaluator", 0)
    ]  # fmt: skip
    configs = [json.loads(replica.env["TF_CONFIG"]) for replica in replicas]
    cluster = {"chief": ["h:2000"], "worker": ["h:2001", "h:2002"], "ps": ["h:2003"]}  # without the evaluator
    assert all(config["cluster"] == cluster and config["environment"] == "cloud" for config in configs)
    assert [config["task"] for config in configs] == [
        {"type": "chief", "index": 0},
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
        {"type": "ps", "index": 0},
        {"type": "evaluator", "index": 0},
    ]
    described = configs[0]["job"]
    assert described["worker_count"] == "2"
    assert described["parameter_server_type"] == "n1-standard-4"
    assert described["python_module"] == "trainer.task"


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"runtimeVersion": "1.15"}, "master"),
        ({"runtimeVersion": "2.1"}, "chief"),
        ({"runtimeVersion": "2.11"}, "chief"),
        ({}, "chief"),
        ({"masterConfig": "{imageUri: gcr.io/a/b}"}, "master"),
        ({"masterConfig": "{imageUri: gcr.io/a/b}", "useChiefInTfConfig": "true"}, "chief"),
        ({"runtimeVersion": "2.11", "useChiefInTfConfig": "false"}, "master"),
    ],
)
def test_the_master_is_called_chief_or_master_as_ai_platform_did(keys, name):
    config = json.loads(told(job(worker=1, **keys))[0].env["TF_CONFIG"])
    assert config["task"]["type"] == name
    assert list(config["cluster"]) == [name, "worker"]


def test_cluster_spec_is_what_vertex_writes():
    specs = [json.loads(replica.env["CLUSTER_SPEC"]) for replica in told(job(worker=1, server=1, evaluator=1))]
    pools = {"workerpool0": ["h:2000"], "workerpool1": ["h:2001"], "workerpool2": ["h:2002"], "workerpool3": ["h:2003"]}
    assert all(spec["cluster"] == pools and spec["environment"] == "cloud" for spec in specs)
    assert [spec["task"]["type"] for spec in specs] == list(pools)
    assert json.loads(specs[0]["job"])["workerCount"] == 1


def world_of(replica: ReplicaProcess) -> list[str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    return [replica.env[name] for name in names if name in replica.env]


def test_master_and_workers_are_the_world_and_share_the_node_that_they_are_on():
    master, first, second, server, evaluator = told(job(2, 1, 1), ["a", "b", "a", "a", "b"])
    assert world_of(master) == ["0", "3", "0", "2", "0", "a", "1999"]
    assert world_of(first) == ["1", "3", "0", "1", "1", "a", "1999"]
    assert world_of(second) == ["2", "3", "1", "2", "0", "a", "1999"]
    assert world_of(server) == world_of(evaluator) == []


def test_a_master_alone_is_free_to_start_processes_of_its_own():
    assert world_of(told(job(server=1))[0]) == []


def test_every_replica_knows_the_job_the_attempt_and_the_directory():
    for replica in told(job(1, 1, 1), attempt=2):
        assert {name: value for name, value in replica.env.items() if name.startswith("FOOTPLATE_")} == {
            "FOOTPLATE_JOB_NAME": "my_job", "FOOTPLATE_ATTEMPT": "2", "FOOTPLATE_JOB_DIR": "gs://bucket/job"
        }  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 4), st.integers(0, 3), st.integers(0, 2), st.lists(st.sampled_from("abc"), min_size=10, max_size=10)
)
def test_the_ranks_of_any_cluster_are_a_world(worker, server, evaluator, hosts):
    from footplate.distributed.world import World

    replicas = told(job(worker, server, evaluator), hosts)
    worlds = [World.from_environ(replica.env) for replica in replicas if "RANK" in replica.env]
    assert [world.rank for world in worlds] == list(range(1 + worker)) if worker else not worlds
    for replica in replicas:
        config = json.loads(replica.env["TF_CONFIG"])
        if config["task"]["type"] != "evaluator":
            assert config["cluster"][config["task"]["type"]][config["task"]["index"]]


def run(
    resolved: ResolvedJob, command: list[str], popen: Any = subprocess.Popen, **options: Any
) -> Iterator[tuple[ReplicaProcess, str]]:
    """Run a command in every replica of a job, to its end. Return each replica's output."""
    rendezvous, *ports = [free_port() for _ in range(1 + len(replica_ids(resolved)))]
    replicas = processes(resolved, [f"127.0.0.1:{port}" for port in ports], f"127.0.0.1:{rendezvous}", 0, None)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [popen(command, env={**os.environ, **planned.env}, **streams, **options) for planned in replicas]
    try:
        for replica, process in zip(replicas, started, strict=True):
            out = process.communicate(timeout=200)[0]
            assert process.returncode == 0, out
            yield replica, out
    finally:
        for process in started:
            process.kill()


DDP = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.full((1, 2), float(dist.get_rank() + 1))).sum().backward()
print(dist.get_rank(), model.module.weight.grad.tolist(), flush=True)
dist.destroy_process_group()
os._exit(0)  # with torch 2.13 one of 70 interpreters that tear down DDP is aborted by a thread of gloo's
"""


@pytest.mark.slow
def test_plain_ddp_of_torch_finds_its_world():
    shown = [out.strip().splitlines()[-1] for _, out in run(job(worker=1), [sys.executable, "-c", DDP], template.Popen)]
    assert shown == ["0 [[1.5, 1.5]]", "1 [[1.5, 1.5]]"]


SERVED = """
import json, os, socket, time
config = json.loads(os.environ["TF_CONFIG"])
cluster, task = config["cluster"], config["task"]

def connect(address):
    host, port = address.split(":")
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            time.sleep(0.05)

if task["type"] == "ps":
    host, port = cluster["ps"][task["index"]].split(":")
    total, pushers = 0, len(cluster["chief"] + cluster["worker"])
    with socket.create_server((host, int(port))) as server:
        for _ in range(pushers):
            peer, _ = server.accept()
            total += int(peer.makefile().readline())
    print("total", total)
else:
    number = {"chief": 100, "worker": 1}[task["type"]] * (task["index"] + 1)
    for address in cluster["ps"]:
        with connect(address) as server:
            server.sendall(f"{number}\\n".encode())
"""


def test_a_program_with_parameter_servers_finds_them_by_tf_config():
    shown = {
        (replica.role, replica.index): out
        for replica, out in run(job(worker=2, server=2), [sys.executable, "-c", SERVED])
    }
    assert shown["parameter_server", 0] == shown["parameter_server", 1] == "total 103\n"


@pytest.mark.slow
def test_a_program_with_a_trainer_trains_on_all_replicas_without_a_change(tmp_path):
    command = [sys.executable, "-m", "trainer.task", "--job-dir", str(tmp_path), "--epochs", "1"]
    (_, master), (_, worker) = run(job(worker=1), command, template.Popen, cwd=EXAMPLES)
    match = re.search(r"val_acc (\S+) after (\d+) steps", master)
    assert match, master
    assert float(match[1]) > 0.6
    assert "val_acc" not in worker
    assert (tmp_path / "model.pt2").exists()
