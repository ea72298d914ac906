"""Agents on Spark: the placement alone, and launches through it, on a session with real executors."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from coming_and_going import wait_for_world_size, work
from cut_off import STEPS, TRAINING, assert_no_trace, steps, train
from launched import gone, runs
from sessions import end_spark_session, spark_session

from footplate.core.errors import ConfigError, LaunchError
from footplate.launch import launch
from footplate.launch.backends import Cluster, connected_cluster
from footplate.launch.cluster import spark
from footplate.launch.cluster.agent import AgentCall
from footplate.launch.cluster.spark import SparkPlacement
from footplate.launch.cluster.spark_session import slots
from footplate.launch.policy import Restarts

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def session() -> Any:
    """The session of all tests. Each executor has a fake GPU, number 5."""
    return spark_session()


@pytest.fixture(autouse=True)
def no_jobs() -> Iterator[None]:
    """Check that a test leaves no job behind."""
    from pyspark import SparkContext

    yield
    context = SparkContext._active_spark_context
    until(lambda: context is None or context._jsc is None or not context.statusTracker().getActiveJobsIds())


def executors() -> list[psutil.Process]:
    """The executors of the session, as processes."""
    return [process for process in psutil.Process().children(recursive=True) if is_executor(process)]


def is_executor(process: psutil.Process) -> bool:
    try:
        return process.name() == "java" and "--executor-id" in process.cmdline()
    except psutil.NoSuchProcess:  # ended meanwhile
        return False


class Home:
    """Accepts stand-ins for agents. Each describes itself, and stays until the connection ends."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []

    def call(self) -> Callable[[int, str], None]:
        """The call of a task."""
        port = self._listening.getsockname()[1]

        def call(index: int, node: str) -> None:
            said = {"index": index, "pid": os.getpid(), "cuda": os.environ.get("CUDA_VISIBLE_DEVICES")}
            os.environ["LEFT_BEHIND"] = "by a task"
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(json.dumps(said).encode() + b"\n")
                connection.recv(1)

        return call

    def hear(self, count: int, within_s: float = 60) -> list[dict[str, Any]]:
        """The descriptions of this number of stand-ins, by index."""
        heard = []
        self._listening.settimeout(within_s)
        for _ in range(count):
            self._connections.append(self._listening.accept()[0])
            heard.append(json.loads(self._connections[-1].makefile().readline()))
        return sorted(heard, key=lambda report: report["index"])

    def rings_within(self, seconds: float) -> bool:
        """Return True if another stand-in connects."""
        return bool(select.select([self._listening], [], [], seconds)[0])

    def hang_up(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def close(self) -> None:
        self.hang_up()
        self._listening.close()


@pytest.fixture
def home() -> Iterator[Home]:
    home = Home()
    yield home
    home.close()


@pytest.fixture
def placement(session: Any) -> Iterator[SparkPlacement]:
    made = SparkPlacement()
    yield made
    made.close()


def until(condition: Callable[[], Any], within_s: float = 60) -> Any:
    """Wait for a true value of `condition`, and return it."""
    end = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


def test_every_place_gets_its_call_at_the_same_time(placement, home):
    assert placement.slots() == 2
    placement.start(range(2), home.call())
    assert [report["index"] for report in home.hear(2)] == [0, 1]
    assert placement.lost() == []


def test_agents_that_end_by_themselves_leave_nothing_to_cancel(placement, home):
    placement.start(range(2), home.call())
    home.hear(2)
    home.hang_up()
    stage = placement._stage
    until(lambda: not stage._thread.is_alive() and not stage._active_tasks())
    placement.close()
    assert not stage._cancelled


def test_agents_that_do_not_end_are_gone_after_close(placement, home):
    placement.start(range(2), home.call())
    frozen, other = (psutil.Process(report["pid"]) for report in home.hear(2))
    frozen.suspend()
    placement.close()
    assert not frozen.is_running()
    assert not other.is_running()


def test_a_close_right_after_the_start_leaves_nothing(placement, home, session):
    placement.start(range(2), home.call())
    placement.close()
    assert session.sparkContext.statusTracker().getActiveJobsIds() == []


def test_a_killed_python_worker_loses_all_places(placement, home):
    placement.start(range(2), home.call())
    os.kill(home.hear(2)[1]["pid"], signal.SIGKILL)
    lost = until(placement.lost)
    assert [failure.index for failure in lost] == [0, 1]
    assert "Python worker exited unexpectedly" in lost[1].text
    assert placement.lost() == []
    assert not home.rings_within(1.0), "Spark has run the stage again by itself"


def test_a_killed_executor_is_replaced_before_the_next_start(placement, home):
    placement.start(range(2), home.call())
    daemon = psutil.Process(home.hear(2)[1]["pid"]).parent()
    assert daemon is not None
    executor = daemon.parent()
    assert executor is not None
    executor.kill()
    assert "ExecutorLostFailure" in until(placement.lost)[0].text
    home.hang_up()
    placement.start(range(2), home.call())
    assert [report["index"] for report in home.hear(2)] == [0, 1]


def test_a_stage_waits_for_the_other_jobs_of_the_session_and_says_so(
    placement, home, session, caplog, monkeypatch, tmp_path
):
    monkeypatch.setattr(spark, "QUEUED_S", 0.5)
    enough = tmp_path / "enough"

    def work(_: int) -> None:
        while not enough.exists():
            time.sleep(0.05)

    other = session.sparkContext.parallelize([1], 1)
    busy = threading.Thread(target=lambda: other.foreach(work))
    busy.start()
    until(lambda: session.sparkContext.statusTracker().getActiveStageIds())
    placement.start(range(2), home.call())
    until(lambda: placement.lost() or "busy with other jobs of this session" in caplog.text)
    enough.touch()
    assert [report["index"] for report in home.hear(2)] == [0, 1]
    busy.join()
    assert placement.lost() == []


def test_what_a_task_did_to_its_process_is_put_back(placement, home, session):
    placement.start(range(2), home.call())
    home.hear(2)
    home.hang_up()
    placement.close()
    seen = session.sparkContext.parallelize(range(2), 2).map(lambda _: os.environ.get("LEFT_BEHIND")).collect()
    assert seen == [None, None]


def test_a_workers_gpus_are_those_that_spark_has_given_to_its_task(session, home):
    placement = SparkPlacement(num_gpus=1)
    assert placement.slots() == 2
    placement.start(range(2), home.call())
    assert [report["cuda"] for report in home.hear(2)] == ["5", "5"]
    placement.close()


def test_a_worker_that_takes_more_than_an_executor_has_finds_no_slot(session):
    assert SparkPlacement(num_cpus=2).slots() == 0


def test_a_shape_that_spark_refuses_is_refused_in_its_words(session):
    with pytest.raises(ConfigError, match=r"these resources: .*gpu, amount: 1 needs to be >= .* amount of 2"):
        SparkPlacement(num_gpus=2)


def test_a_resource_profile_may_ask_for_tasks_but_not_for_executors(session):
    from pyspark.resource import ExecutorResourceRequests, ResourceProfileBuilder, TaskResourceRequests

    tasks = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1).resource("gpu", 1)).build
    assert SparkPlacement(profile=tasks).slots() == 2
    executors = ResourceProfileBuilder().require(ExecutorResourceRequests().cores(1)).build
    with pytest.raises(ConfigError, match=r"executors of its own \(cores.*when you make the session"):
        SparkPlacement(profile=executors)
    with pytest.raises(ConfigError, match="leave num_cpus and num_gpus out"):
        SparkPlacement(num_cpus=1, profile=tasks)


def test_a_worker_takes_whole_gpus_or_none(session):
    assert SparkPlacement(num_gpus=0).slots() == 2
    with pytest.raises(ConfigError, match=r"num_gpus=0.5: a worker has whole GPUs"):
        SparkPlacement(num_gpus=0.5)


@pytest.mark.parametrize("wrong", [{"num_cpus": 0}, {"num_gpus": -1}])
def test_a_number_that_cannot_be_is_refused(session, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name}={value}: expected"):
        SparkPlacement(**wrong)


def test_a_task_that_raises_ends_the_launch_with_what_it_raised(placement):
    def call(index, node):
        raise ModuleNotFoundError("No module named 'footplate'")

    placement.start(range(2), call)
    with pytest.raises(
        LaunchError, match="An agent can't run on Spark's executors: ModuleNotFoundError: No module named"
    ):
        until(placement.lost)


def test_a_driver_that_executors_cannot_reach_is_said_so(placement):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    placement.start(range(2), AgentCall("127.0.0.1", port, b"token"))
    with pytest.raises(LaunchError, match=r"(?s)can't reach the driver at 127.0.0.1:.*which is spark.driver.host"):
        until(placement.lost)


def test_the_session_is_found_from_any_thread(session):
    seen: list[str | None] = []
    thread = threading.Thread(target=lambda: seen.append(connected_cluster({})))
    thread.start()
    thread.join()
    assert seen == [connected_cluster({})] == ["spark"]


def test_an_executor_killed_in_the_middle_of_training_leaves_no_trace_in_the_losses(
    session, tmp_path, uninterrupted, said
):
    def kill_an_executor():
        until(lambda: len(steps(tmp_path / "killed", 0)) > 8, 120)
        executors()[1].kill()

    killer = threading.Thread(target=kill_an_executor)
    killer.start()
    backend = Cluster(SparkPlacement())
    assert launch(train, tmp_path / "killed", 0.05, world_size=2, backend=backend, preload=TRAINING) == STEPS
    killer.join()
    assert "max_host_restarts" not in said.text
    assert "attempt 1 starts now (restart 1 of 10)" in said.text
    assert_no_trace(uninterrupted, tmp_path / "killed")


def test_an_executor_that_spark_decommissions_is_left_without_a_restart_or_a_lost_step(session, tmp_path, said):
    context = session.sparkContext
    spark, classes = context._jsc.sc(), context._jvm

    def executor_with_the_rank():
        (stage,) = context.statusTracker().getActiveStageIds()
        return spark.statusStore().taskList(stage, 0, 1).apply(0).executorId()

    def decommission_its_executor():
        until(lambda: len(steps(tmp_path / "cut", 0)) > 8, 120)
        notice = classes.org.apache.spark.scheduler.ExecutorDecommissionInfo("preempted", classes.scala.Option.empty())
        left.append(executor_with_the_rank())
        assert spark.schedulerBackend().decommissionExecutor(left[0], notice, False, False)

    left: list[str] = []
    assert launch(train, tmp_path / "whole", 0.0, world_size=1, preload=TRAINING) == 2 * STEPS
    decommission = threading.Thread(target=decommission_its_executor)
    decommission.start()
    never = Restarts(max_restarts=0, max_host_restarts=0)
    arguments = {"world_size": 1, "backend": Cluster(SparkPlacement()), "restarts": never, "preload": TRAINING}
    assert launch(train, tmp_path / "cut", 0.1, **arguments) == 2 * STEPS
    decommission.join()
    assert f"Spark decommissions executor {left[0]}, which has some of the ranks" in said.text
    assert_no_trace(tmp_path / "whole", tmp_path / "cut", ranks=1)
    # The rank has saved, so no step was made twice.
    assert len(steps(tmp_path / "cut", 0)) == 2 * STEPS
    # The other tests need both executors.
    until(lambda: slots(context, None) == 2, 120)


def test_a_launch_goes_on_without_a_lost_executor_and_with_one_that_comes(session, tmp_path):
    spark = session.sparkContext._jsc.sc()

    def come_and_go():
        try:
            wait_for_world_size(tmp_path, 2)
            # Spark doesn't replace an executor that was killed in this way, and counts from 0 what is requested afterwards.
            spark.killExecutor(spark.getExecutorIds().head())
            wait_for_world_size(tmp_path, 1)
            spark.requestExecutors(2)
            wait_for_world_size(tmp_path, 2)
        finally:
            (tmp_path / "end").touch()

    executors_come_and_go = threading.Thread(target=come_and_go)
    executors_come_and_go.start()
    backend = Cluster(SparkPlacement(min_workers=1))
    outcome = launch(work, tmp_path, world_size=2, backend=backend, preload=())
    executors_come_and_go.join()
    assert (outcome[0], outcome[-1]) == (2, 2)
    assert 1 in outcome


def test_ctrl_c_stops_the_stage_and_leaves_nothing(session, tmp_path):
    def work():
        (tmp_path / os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(600)

    def interrupt():
        until(lambda: all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        launch(work, world_size=2, backend=Cluster(SparkPlacement()), preload=())
    assert not any(psutil.pid_exists(int((tmp_path / rank).read_text())) for rank in "01")
    # Spark's listener hears of the end a little later.
    until(lambda: session.sparkContext.statusTracker().getActiveJobsIds() == [])


def test_when_the_driver_is_killed_nothing_of_the_launch_or_the_session_is_left(program):
    running = program(f"""
import os, sys, time
sys.path.append({str(Path(__file__).parent)!r})
from sessions import two_executors
from footplate.launch import launch
from footplate.launch.backends import named
def work():
    print("rank", os.environ["RANK"], "works")
    time.sleep(600)
with two_executors():
    launch(work, world_size=2, backend=named("spark"), preload=())
""")
    running.read_until("rank 0 works", "rank 1 works")
    family = [process for process in running.family() if runs(process)]  # a process of Java's start is a zombie
    assert (
        sum("footplate.launch.fork_server" in " ".join(process.cmdline()) for process in family) >= 3
    )  # a fork server, two workers
    running.process.kill()
    assert gone(family)


def test_the_benchmark_compares_launches_with_torch_distributor(session, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import launch_spark

    rows, ratios = launch_spark.compare(rounds=1, with_local_mode=False)
    assert set(ratios) == {"spark_vs_torch_distributor", "spark_returned_vs_torch_distributor"}
    assert [row["name"] for row in rows] == ["footplate on Spark, 2 workers", "TorchDistributor on Spark, 2 workers"]
    assert all(0 < run["first_s"] <= run["returned_s"] for row in rows for run in row["rounds"])


def test_more_workers_than_slots_are_refused_at_once_with_how_many_there_are(session):
    with pytest.raises(LaunchError, match="np=3: spark can hold 2"):
        launch(print, world_size=3, backend=Cluster(SparkPlacement()))


def test_a_session_that_was_stopped_is_said_so(session):
    placement = SparkPlacement()
    end_spark_session()
    with pytest.raises(LaunchError, match="session was stopped: make a new one"):
        placement.slots()
    with pytest.raises(LaunchError, match="session was stopped: make a new one"):
        placement.start(range(2), AgentCall("127.0.0.1", 1, b""))


def test_threads_of_a_local_master_are_places_too(home):
    from pyspark.sql import SparkSession

    end_spark_session()  # a process has one session at a time
    with SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate():
        placement = SparkPlacement()
        assert placement.slots() == 2
        placement.start(range(2), home.call())
        assert [report["index"] for report in home.hear(2)] == [0, 1]
        placement.close()
