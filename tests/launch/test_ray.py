"""Launches in a real Ray cluster of several nodes, which are all on this machine."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from coming_and_going import wait_for_world_size, work
from cut_off import STEPS, TRAINING, assert_no_trace, steps, train
from hypothesis import given
from hypothesis import strategies as st
from process_placement import rank
from ray_nodes import PROGRAM, SMALL, V100, ray_nodes

from footplate.core.errors import ConfigError, LaunchError
from footplate.launch import Restarts, launch, worker
from footplate.launch.backends import Cluster, named
from footplate.launch.cluster.ray import RayPlacement, slots_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def cluster() -> Any:
    """Two nodes with two cores each. The second declares a V100."""
    return ray_nodes()


@pytest.fixture(scope="module")
def rooms() -> Iterator[list[Any]]:
    """Three nodes with a core and a `room`. Tests remove those that they lose from the list."""
    nodes = ray_nodes()
    rooms = [nodes.add_node(num_cpus=1, resources={"room": 1}, **SMALL) for _ in range(3)]
    nodes.wait_for_nodes(120)
    yield rooms
    for node in rooms:
        nodes.remove_node(node, allow_graceful=False)


def on(**needs) -> Cluster:
    return Cluster(RayPlacement(**needs))


def test_ranks_on_one_node_share_it(cluster):
    def work():
        return os.environ["LOCAL_WORLD_SIZE"], os.getppid()

    assert launch(work, world_size=2, backend=on(strategy="STRICT_PACK"), preload=())[0] == "2"


def test_slots_follow_from_what_a_worker_needs_and_how_workers_are_placed(cluster):
    assert RayPlacement().slots() == 4
    assert RayPlacement(num_cpus=2).slots() == 2
    assert RayPlacement(num_cpus=0.5).slots() == 8
    assert RayPlacement(strategy="STRICT_SPREAD").slots() == 2
    assert RayPlacement(strategy="STRICT_PACK").slots() == 2
    assert RayPlacement(resources=V100).slots() == 1
    assert RayPlacement(num_gpus=1).slots() == 0
    assert named("ray", {"num_cpus": 4}).slots() == 0


def test_the_benchmark_compares_launches_with_ray_train(cluster, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import launch_ray

    rows, ratios = launch_ray.compare([2], rounds=1)
    assert set(ratios) == {"ray_vs_ray_train_2", "ray_returned_vs_ray_train_2"}
    assert [row["name"] for row in rows] == ["footplate on Ray, 2 workers", "Ray Train, 2 workers"]
    assert all(0 < run["first_s"] <= run["returned_s"] for row in rows for run in row["rounds"])


@given(st.integers(0, 64), st.integers(1, 8), st.integers(1, 50))
def test_a_node_holds_as_many_as_fit(cores, needed, fraction):
    assert slots_of({"CPU": float(cores)}, {"CPU": needed}) == cores // needed
    assert slots_of({"GPU": 1.0}, {"GPU": 1 / fraction}) == fraction
    assert slots_of({"CPU": 1.0}, {"GPU": 1}) == 0


def test_a_worker_with_an_accelerator_is_placed_where_one_is(cluster):
    def work():
        return [process.pid for process in psutil.Process().parents()]

    backend = on(accelerator_type="V100")
    assert backend.slots() == 2
    raylet = cluster.second.all_processes["raylet"][0].process.pid
    assert raylet in launch(work, world_size=1, backend=backend, preload=())


def test_more_than_there_is_room_for_is_refused_at_once_with_what_there_is(cluster):
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"np=5: ray can hold 4 worker"):
        launch(print, world_size=5, backend=on())
    with pytest.raises(LaunchError) as refused:
        RayPlacement(num_gpus=1).start(range(3), None)
    assert "3 worker(s) of CPU 1, GPU 1, placed PACK: the Ray cluster can hold 0, 3 too few" in str(refused.value)
    assert str(refused.value).count("(CPU 2, GPU 0)") == 2
    assert time.monotonic() - began < 30


def test_a_group_that_finds_no_free_resources_in_time_is_refused(cluster, tmp_path):
    def hold():
        (tmp_path / "held").touch()
        while not (tmp_path / "enough").exists():
            time.sleep(0.05)

    whole_node = {"num_cpus": 2, "strategy": "STRICT_SPREAD"}
    holder = threading.Thread(target=lambda: launch(hold, world_size=1, backend=on(**whole_node), preload=()))
    holder.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.05)
    with pytest.raises(
        LaunchError, match=r"no free resources in time. 2 worker\(s\) of CPU 2.* need more than is free now: CPU 2"
    ):
        launch(print, world_size=2, backend=on(**whole_node, wait_s=1), preload=())
    (tmp_path / "enough").touch()
    holder.join()
    assert launch(lambda: "now", world_size=2, backend=on(**whole_node), preload=()) == "now"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"strategy": "WIDE"}, "strategy='WIDE': expected one of PACK, SPREAD"),
        ({"num_gpus": 0.5}, "num_gpus=0.5: a worker has whole GPUs"),
        ({"num_cpus": -1}, "can't need CPU -1"),
        ({"num_cpus": 0}, "Give a worker at least one resource"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(cluster, given, words):
    with pytest.raises(ConfigError, match=words):
        RayPlacement(**given)


def test_another_address_than_the_connected_one_is_refused(cluster):
    with pytest.raises(LaunchError, match=f"connected to the Ray at {cluster.address} already"):
        RayPlacement(address="127.0.0.1:1")


def test_ray_client_is_refused(cluster):
    with pytest.raises(LaunchError, match=r"Ray Client\. Its program runs outside the cluster"):
        RayPlacement(address="ray://127.0.0.1:10001")


def test_other_versions_on_a_node_are_refused(cluster, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import footplate.core.version\nfootplate.core.version.__version__ = '9.9'\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with pytest.raises(LaunchError, match=rf"{socket.gethostname()} has footplate 9\.9, here footplate"):
        launch(print, world_size=1, backend=on(runtime_env={"env_vars": {"PYTHONPATH": path}}), preload=())


def test_a_node_removed_in_the_middle_of_training_leaves_no_trace_in_the_losses(
    cluster, rooms, tmp_path, uninterrupted, said
):
    def train_and_tell_where(directory, pause_s):
        if worker.attempt() == 0:
            above = [str(process.pid) for process in psutil.Process().parents()]
            Path(f"{directory}.{os.environ['RANK']}.above").write_text(" ".join(above))
        return train(directory, pause_s)

    assert len(rooms) == 3  # one to spare

    def remove_its_node():
        while len(steps(tmp_path / "cut", 1)) < 8:
            time.sleep(0.05)
        above = (tmp_path / "cut.1.above").read_text().split()
        (node,) = [room for room in rooms if str(room.all_processes["raylet"][0].process.pid) in above]
        rooms.remove(node)
        cluster.remove_node(node, allow_graceful=False)

    remover = threading.Thread(target=remove_its_node)
    remover.start()
    backend = on(strategy="STRICT_SPREAD", resources={"room": 1})
    patient = Restarts(peers_grace_s=60)  # the other rank fails of it first; Ray finds the node dead by its heartbeats
    arguments = {"world_size": 2, "backend": backend, "restarts": patient, "preload": TRAINING}
    assert launch(train_and_tell_where, tmp_path / "cut", 0.1, **arguments) == STEPS
    remover.join()
    lines = [record.message for record in said.records if record.levelname == "WARNING"]
    # The end of the process that starts ranks may be seen before the end of its node. The next attempt may then begin on
    # that node, and is lost with it.
    assert len(lines) in (1, 2)
    assert all("was lost with its node" in line or "lost with the process that starts them" in line for line in lines)
    assert "attempt 1 starts now (restart 1 of 10)" in lines[0]
    assert_no_trace(uninterrupted, tmp_path / "cut", restarts=len(lines))


def test_a_node_that_ray_drains_is_left_without_a_restart_or_a_lost_step(cluster, rooms, tmp_path, uninterrupted, said):
    rooms.append(cluster.add_node(num_cpus=1, resources={"room": 1}, **SMALL))
    cluster.wait_for_nodes(120)

    def train_and_tell_where(directory, pause_s):
        place = Path(f"{directory}.{os.environ['RANK']}.{worker.attempt()}.above")
        place.write_text(" ".join(str(process.pid) for process in psutil.Process().parents()))
        return train(directory, pause_s)

    def node_of(attempt: int) -> Any:
        above = (tmp_path / f"cut.1.{attempt}.above").read_text().split()
        (node,) = [room for room in rooms if str(room.all_processes["raylet"][0].process.pid) in above]
        return node

    def drain_its_node():
        while len(steps(tmp_path / "cut", 1)) < 8:
            time.sleep(0.05)
        deadline_ms = int(time.time() * 1000) + 600_000
        arguments = (node_of(0).node_id, autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION, "preempted", deadline_ms)
        assert ray.GcsClient(cluster.address).drain_node(*arguments)[0]

    from ray import _raylet as ray
    from ray.core.generated import autoscaler_pb2

    drainer = threading.Thread(target=drain_its_node)
    drainer.start()
    backend = on(strategy="STRICT_SPREAD", resources={"room": 1})
    never = Restarts(max_restarts=0, max_host_restarts=0)
    arguments = {"world_size": 2, "backend": backend, "restarts": never, "preload": TRAINING}
    assert launch(train_and_tell_where, tmp_path / "cut", 0.2, **arguments) == STEPS
    drainer.join()
    assert "Ray drains node" in said.text
    assert node_of(0) is not node_of(1)
    assert_no_trace(uninterrupted, tmp_path / "cut")
    # Both ranks have saved at the same step, so no step was made twice.
    assert all(len(steps(tmp_path / "cut", number)) == STEPS for number in (0, 1))
    drained = node_of(0)
    rooms.remove(drained)
    cluster.remove_node(drained, allow_graceful=False)


def test_a_launch_goes_on_without_a_lost_node_and_with_one_that_comes(cluster, rooms, tmp_path):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Tenant:
        def lives(self) -> bool:
            return True

    while len(rooms) < 3:
        rooms.append(cluster.add_node(num_cpus=1, resources={"room": 1}, **SMALL))
    cluster.wait_for_nodes(120)
    # Somebody else has the third node until later.
    there = NodeAffinitySchedulingStrategy(rooms[0].node_id, soft=False)
    tenant = ray.remote(Tenant).options(num_cpus=1, resources={"room": 1}, scheduling_strategy=there).remote()
    assert ray.get(tenant.lives.remote(), timeout=120)

    def come_and_go():
        try:
            wait_for_world_size(tmp_path, 2)
            cluster.remove_node(rooms.pop(), allow_graceful=False)
            wait_for_world_size(tmp_path, 1)
            ray.kill(tenant)
            wait_for_world_size(tmp_path, 2)
        finally:
            (tmp_path / "end").touch()

    nodes = threading.Thread(target=come_and_go)
    nodes.start()
    backend = on(resources={"room": 1}, min_workers=1)
    assert launch(work, tmp_path, world_size=2, backend=backend, preload=()) == [2, 1, 2]
    nodes.join()


def test_a_lost_node_that_nobody_replaces_costs_its_rank_where_that_is_allowed(cluster, rooms, tmp_path):
    while len(rooms) > 2:
        cluster.remove_node(rooms.pop(), allow_graceful=False)

    def work():
        if worker.attempt() == 0:
            (tmp_path / str(rank())).touch()
            time.sleep(60)
        return os.environ["WORLD_SIZE"]

    def remove():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        cluster.remove_node(rooms.pop(), allow_graceful=False)

    remover = threading.Thread(target=remove)
    remover.start()
    restarts = Restarts(min_world_size=1, peers_grace_s=0.5)
    outcome = launch(work, world_size=2, backend=on(resources={"room": 1}), restarts=restarts, preload=())
    remover.join()
    assert outcome == "1"


def test_a_program_in_the_cluster_finds_it_by_its_environment(program, cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    code, said = program(PROGRAM).end(within_s=120)
    assert code == 0, said
    own = [line for line in said.splitlines() if line.startswith(("[rank", "result"))]  # Ray says things of its own
    assert sorted(own) == ["[rank 0] hello", "[rank 1] hello", "result 2"]
