"""Ray and Spark on machines of a lab: a machine is lost, a spare one takes its place, and the numbers are the same.

`benchmarks/lab_train.py` is the training. Each machine has room for one rank, and there is one more than ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyspark
import pytest
from lab_losses import SCRIPT, Losses, losses

from footplate.lab import Command, Lab, Machine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

END_S = 300
# A launch of two ranks. `lab_train` is imported on the machine that runs a rank.
TRAIN = """
import sys
from pathlib import Path

import footplate as fp
{before}

def train():
    import sys

    sys.path.insert(0, "/mnt")
    import lab_train

    lab_train.train(Path("/mnt/out"), 0.2, 3)
    return "trained"


runner = fp.Runner(np=2, backend="{backend}", resources={resources}, heartbeat_timeout=5, max_restarts=0)
print(runner.run(train), flush=True)
"""
SESSION = """
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("spark://10.77.0.10:7077").config("spark.executor.memory", "512m")
builder = builder.config("spark.driver.host", "10.77.0.10").config("spark.ui.enabled", "false")
builder.config("spark.ui.showConsoleProgress", "false").getOrCreate().sparkContext.setLogLevel("ERROR")
"""


@pytest.fixture
def until(lab) -> Callable[[Lab, Callable[[], bool]], None]:
    def wait(lab: Lab, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + END_S
        while not condition():
            assert time.monotonic() < limit, said(lab)
            time.sleep(0.05)

    return wait


def said(lab: Lab) -> str:
    return "".join(f"{log.name}:\n{log.read_text()[-3000:]}\n" for log in sorted(lab.shared.glob("*.log")))


def start(machine: Machine, lab: Lab, log: str, *words: object, **env: str) -> Command:
    with (lab.shared / f"{log}.log").open("ab") as output:
        return machine.start(words, env={"OMP_NUM_THREADS": "1", **env}, output=output)


def launch(lab: Lab, backend: str, before: str, resources: object, **env: str) -> Command:
    """Start the program on machine 0."""
    shutil.copy(SCRIPT, lab.shared)
    (lab.shared / "launch.py").write_text(TRAIN.format(backend=backend, before=before, resources=resources))
    return start(lab.machines[0], lab, "launch", "python", "/mnt/launch.py", **env)


def one_that_runs(lab: Lab, name: str) -> Machine:
    """A machine, but not the first one, with a process of this name."""
    return next(machine for machine in lab.machines[1:] if any(name in line for line in machine.processes()))


def test_a_machine_of_a_ray_cluster_that_is_cut_off_is_replaced(lab, until, undisturbed: Losses):
    ray = lab(3)
    head, *others = ray.machines
    # Without what the test doesn't need: monitors, a worker for each core in advance, and metrics.
    few = [
        "--num-cpus", 1, "--object-store-memory", 80_000_000, "--disable-usage-stats", "--include-log-monitor", "false",
    ]  # fmt: skip
    system = json.dumps({"prestart_worker_first_driver": False, "enable_metrics_collection": False})
    first = [
        "ray", "start", "--head", "--include-dashboard", "false", "--no-monitor", "--system-config", system,
        "--node-ip-address", head.address, *few,
    ]  # fmt: skip
    assert head.run(first)[0] == 0
    joining = [
        start(machine, ray, machine.name, "ray", "start", "--address", f"{head.address}:6379", "--node-ip-address",
              machine.address, *few)
        for machine in others
    ]  # fmt: skip
    assert [command.wait(END_S) for command in joining] == [0, 0], said(ray)

    program = launch(ray, "ray", "", {"strategy": "STRICT_SPREAD", "wait_s": 200})
    until(ray, lambda: any(step >= 8 for _, step in losses(ray.shared / "out")))
    ray.cut(one_that_runs(ray, "FootplateAgent"))
    assert program.wait(END_S) == 0, said(ray)
    assert losses(ray.shared / "out") == undisturbed
    assert "nothing has come from its machine for" in said(ray)


def test_a_machine_of_a_spark_cluster_that_is_killed_is_replaced(lab, until, undisturbed: Losses):
    spark = lab(4)
    home = Path(pyspark.__file__).parent
    java = {
        "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable, "SPARK_WORKER_DIR": "/tmp/work",
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", "JAVA_HOME": os.environ.get("JAVA_HOME", ""),
    }  # fmt: skip
    daemon = [home / "bin" / "spark-class"]
    first, *others = spark.machines
    master = ["org.apache.spark.deploy.master.Master", "--host", first.address, "--port", 7077]
    start(first, spark, "master", *daemon, *master, **java)
    for machine in others:
        worker = ["org.apache.spark.deploy.worker.Worker", "--host", machine.address, "--cores", 1, "--memory", "600m"]
        start(machine, spark, machine.name, *daemon, *worker, f"spark://{first.address}:7077", **java)

    program = launch(spark, "spark", SESSION, {}, SPARK_LOCAL_IP=first.address, **java)
    until(spark, lambda: any(step >= 8 for _, step in losses(spark.shared / "out")))
    one_that_runs(spark, "pyspark.daemon").kill()
    assert program.wait(END_S) == 0, said(spark)
    assert losses(spark.shared / "out") == undisturbed
    assert "attempt 1 starts now" in said(spark)
