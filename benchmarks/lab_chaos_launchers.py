"""Launchers of a training on the machines of a lab: `footplate run`, Ray and Spark.

`lab_chaos.py` strikes the training of each launcher with the same faults. This file has what differs:

    launcher.start()            starts the training on machines on which nothing runs: the cluster, then the program
    launcher.start_on(number)   starts the part of one machine again: its command, its raylet, its Spark worker
    launcher.kills              processes of the launcher that host a rank; each is a kind of fault
    launcher.services           the engine's own processes, which may stay when the program has ended

Machine 0 controls the training: it has Ray's head or Spark's master, and the program. It also has a rank, as every other
machine has but the spare one.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from footplate.lab import Command, Lab, Machine

HEARTBEAT_S = 5.0
PAUSE_S = 0.1
START_S = 120.0
SCRIPTS = [Path(__file__).with_name(name) for name in ("lab_train.py", "lab_chaos_program.py")]
VARIABLES = {"FOOTPLATE_TOKEN": "a-token-for-the-lab", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Kill:
    """A process that hosts a rank, to be killed.

    Attributes:
        meaning: of the fault, for the table.
        process: a part of the command line of the process, which is an ancestor of the rank.
        start_again: whether the part of the machine ends with it, and must be started again.
    """

    meaning: str
    process: str
    start_again: bool = False


class Launcher(ABC):
    """A launcher, and the training that it runs.

    Args:
        lab: whose machines are used.
        epochs: of the training.

    Attributes:
        hosts: the machines with a rank, machine 0 first.
        spare: the other one.
        program: the command on machine 0, whose end is the end of the training.
        log: the output of the program.
    """

    packages: ClassVar[tuple[str, ...]] = ()
    kills: ClassVar[Mapping[str, Kill]]
    # Processes of the engine, by their command lines.
    services: ClassVar[re.Pattern[str]]
    # Processes that have hosted a rank, and that an engine keeps on a machine that it can't reach.
    idle_hosts: ClassVar[re.Pattern[str]]

    program: Command

    def __init__(self, lab: Lab, epochs: int) -> None:
        self.lab = lab
        self.epochs = epochs
        *self.hosts, self.spare = lab.machines
        self.log = lab.shared / "program.log"
        for script in SCRIPTS:
            shutil.copy(script, lab.shared)

    @abstractmethod
    def start(self) -> None:
        """Start the training on machines on which nothing runs."""

    @abstractmethod
    def start_on(self, number: int) -> Command:
        """Start the part of a machine, also when the training already runs on the other machines."""

    def start_command(self, host: Machine, words: list[object], log: Path, **variables: str) -> Command:
        """Start a command on a machine, with its output in a file."""
        with log.open("ab") as output:
            return host.start(words, env={**VARIABLES, **variables}, output=output)


class FootplateRun(Launcher):
    """`footplate run` on each machine."""

    kills: ClassVar = {
        "kill command": Kill(
            "kill -9 of `footplate run` on a machine; the command is given again", "footplate run --nnodes", True
        ),
    }
    services = idle_hosts = re.compile("$^")

    def start(self) -> None:
        commands = [self.start_on(number) for number in range(len(self.hosts))]
        self.program = commands[0]

    def start_on(self, number: int) -> Command:
        world = len(self.hosts)
        words: list[object] = [
            "footplate", "run", "--nnodes", world, "--node-rank", number, "--np", world, "--max-restarts", 99,
            "--max-host-restarts", 99, "--heartbeat-timeout", HEARTBEAT_S, "--master-addr", self.hosts[0].address,
            "/mnt/lab_train.py", "/mnt/out", PAUSE_S, self.epochs,
        ]  # fmt: skip
        return self.start_command(
            self.hosts[number], words, self.lab.shared / f"node-{number}.log" if number else self.log
        )


class Cluster(Launcher):
    """A cluster's engine. The program on machine 0 uses `Runner`."""

    engine: ClassVar[str]
    variables: ClassVar[Mapping[str, str]] = {}

    def start_program(self) -> None:
        head = self.hosts[0]
        words = ["python", "/mnt/lab_chaos_program.py", self.engine, len(self.hosts), head.address, HEARTBEAT_S]
        words += [PAUSE_S, self.epochs]
        self.program = self.start_command(head, words, self.log, **self.variables)

    def start_service(self, host: Machine, words: list[object]) -> Command:
        return self.start_command(host, words, self.lab.shared / f"{host.name}.log", **self.variables)


class Ray(Cluster):
    """A Ray cluster."""

    engine = "ray"
    packages = ("ray",)
    kills: ClassVar = {
        "kill actor": Kill("kill -9 of the actor's process that hosts a rank", "ray::FootplateAgent"),
        "kill raylet": Kill("kill -9 of a machine's raylet; it is started again", "raylet/raylet", True),
    }
    services = re.compile(
        r"gcs_server|raylet/raylet|ray/dashboard|ray/_private|ray\.util\.client|ray::(IDLE|DashboardAgent|RuntimeEnv)"
    )
    idle_hosts = re.compile(r"ray::FootplateAgent$")
    variables: ClassVar = {"RAY_USAGE_STATS_ENABLED": "0"}

    def start(self) -> None:
        # The other nodes can't register before the head is there.
        self._await(self.start_on(0))
        for joining in [self.start_on(number) for number in range(1, len(self.hosts))]:
            self._await(joining)
        self.start_program()

    def start_on(self, number: int) -> Command:
        host, head = self.hosts[number], self.hosts[0]
        words: list[object] = [
            "ray", "start", "--node-ip-address", host.address, "--num-cpus", 1, "--object-store-memory", 80_000_000,
            "--disable-usage-stats", "--include-log-monitor", "false",
        ]  # fmt: skip
        if number == 0:
            words += ["--head", "--include-dashboard", "false", "--no-monitor"]
        else:
            words += ["--address", f"{head.address}:6379"]
        return self.start_service(host, words)

    def _await(self, joining: Command) -> None:
        if joining.wait(START_S):
            logs = sorted(self.lab.shared.glob("m*.log"))
            raise RuntimeError("`ray start` failed:\n" + "\n".join(log.read_text()[-2000:] for log in logs))


class Spark(Cluster):
    """A standalone cluster of Spark, with a session of its own for the program."""

    engine = "spark"
    packages = ("pyspark",)
    kills: ClassVar = {
        "kill Python worker": Kill("kill -9 of the Python worker that hosts a rank", "pyspark.daemon"),
        "kill executor": Kill("kill -9 of the executor that hosts a rank", "CoarseGrainedExecutorBackend"),
        "kill Spark worker": Kill("kill -9 of a machine's Spark worker; it is started again", "worker.Worker", True),
    }
    # Spark's shell scripts become Java, which doesn't reap their children.
    services = re.compile(r"deploy\.(master\.Master|worker\.Worker)|\[bash\] <defunct>")
    idle_hosts = re.compile(r"CoarseGrainedExecutorBackend|pyspark\.daemon")
    # Spark starts many Java machines, which must start quickly and not be fast later.
    variables: ClassVar = {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_WORKER_DIR": "/tmp/work",
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "JAVA_HOME": os.environ.get("JAVA_HOME", ""),
    }

    def start(self) -> None:
        head = self.hosts[0]
        self._run_class(head, "master.Master", "--host", head.address, "--port", 7077)
        for number in range(len(self.hosts)):
            self.start_on(number)
        self.start_program()

    def start_on(self, number: int) -> Command:
        host, master = self.hosts[number], f"spark://{self.hosts[0].address}:7077"
        return self._run_class(host, "worker.Worker", "--host", host.address, "--cores", 1, "--memory", "600m", master)

    def _run_class(self, host: Machine, name: str, *words: object) -> Command:
        import pyspark

        program = Path(pyspark.__file__).with_name("bin") / "spark-class"
        return self.start_service(host, [program, f"org.apache.spark.deploy.{name}", *words])


LAUNCHERS: dict[str, type[Launcher]] = {"footplate": FootplateRun, "ray": Ray, "spark": Spark}
