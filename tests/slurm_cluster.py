"""Slurm's real daemons on this machine, for a whole session: a controller and four nodes.

    munged      one, with a key of its own
    slurmctld   the controller
    slurmd -N   one for each node, NAMEn1 to NAMEn4, which share this machine. Each has 8 cores and 4 GPUs that don't exist

The times are shorter than on a real cluster: a node is lost after some seconds, and a requeued job waits for some seconds
(`cred_expire`), not for two minutes. There is no slurmdbd, so `sacct` has no answer.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ports import free_port

from footplate.launch.process_lifetime import die_with, kill_marked

PATIENCE_S = 60.0
# Slurm's own wait before it starts a requeued job again.
REQUEUE_S = 5

CONF = """\
ClusterName=footplate
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket,cred_expire={requeue_s}
SlurmctldPort={port}
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=5
KillWait=2
MinJobAge=300
MpiDefault=none
SwitchType=switch/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
PartitionName=main Nodes=ALL Default=YES MaxTime=2:00:00 PriorityTier=1 State=UP
PartitionName=urgent Nodes=ALL MaxTime=2:00:00 PriorityTier=9 State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=64000 Gres=gpu:4\n"
# Slurm wants a device file for each GPU. These exist everywhere, and nothing opens them as GPUs.
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
# The variable that marks the daemons of a node. Slurm marks the processes of jobs itself.
MARK = "FOOTPLATE_TEST_NODE"


class SlurmCluster:
    """The cluster.

    Attributes:
        nodes: the names of its nodes, which no other cluster of this machine has.
        conf: the path of its slurm.conf, for the variable SLURM_CONF.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self.nodes = tuple(f"{place.name}n{number}" for number in range(1, 5))
        self.conf = place / "slurm.conf"
        self._munged: subprocess.Popen[bytes] | None = None
        self._controller: subprocess.Popen[bytes] | None = None
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons, and wait until they answer."""
        for program in ("munged", "slurmctld", "slurmd"):
            assert shutil.which(program), f"{program} is missing. Install it with: apt-get install slurm-wlm munge"
        self._write_files()
        self._munged = self._spawn(
            "munged", "--foreground", "--force", f"--socket={self._place}/munge.socket", f"--key-file={self._place}/key",
            f"--pid-file={self._place}/munged.pid", f"--seed-file={self._place}/seed",
        )  # fmt: skip
        self.wait(lambda: (self._place / "munge.socket").exists())
        self.start_controller()
        for name in self.nodes:
            self.start_node(name)
        self.wait_for_nodes()

    def start_controller(self) -> None:
        """Start the controller, which reads its state from disk."""
        self._controller = self._spawn("slurmctld", "-D", "-f", str(self.conf))

    def stop_controller(self) -> None:
        """End the controller, which writes its state to disk. The nodes and their jobs go on."""
        assert self._controller is not None
        self._controller.terminate()
        self._controller.wait()

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self._nodes[name] = self._spawn("slurmd", "-D", "-N", name, "-f", str(self.conf), mark=name)

    def lose_node(self, name: str) -> None:
        """Kill all processes of a node, as a power cut does, and tell the controller that the node is down.

        The controller would find that out itself, after `SlurmdTimeout` and its next look.
        """
        kill_marked(MARK, name)
        kill_marked("SLURMD_NODENAME", name)
        self._nodes[name].wait()
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")

    def wait_for_nodes(self) -> None:
        """Wait until all nodes are idle."""
        expected = {f"{name} idle" for name in self.nodes}
        self.wait(lambda: expected == set(self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()))

    def wait(self, condition: Callable[[], Any]) -> None:
        """Wait until a function returns True."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"it never happened\n{self.logs()}"
            time.sleep(0.05)

    def run(self, *command: str, **variables: str) -> str:
        """Run one of Slurm's commands. Returns its output, or its errors if it fails."""
        environ = {**os.environ, "SLURM_CONF": str(self.conf), **variables}
        result = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=PATIENCE_S)
        return result.stdout if result.returncode == 0 else result.stderr

    def clear(self) -> None:
        """Cancel all jobs, and bring all nodes back."""
        self.run("scancel", f"--user={getpass.getuser()}")
        self.wait(lambda: not self.run("squeue", "--noheader", "--states=pending,running,completing,suspended"))
        for name, daemon in self._nodes.items():
            if daemon.poll() is not None:
                self.start_node(name)
        for name in self.nodes:
            self.run("scontrol", "update", f"nodename={name}", "state=resume")
        self.wait_for_nodes()

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"{path}:\n{path.read_text()[-2000:]}" for path in sorted(self._place.glob("*.log")))

    def stop(self) -> None:
        """End all daemons, and everything that runs on the nodes."""
        for daemon in (*self._nodes.values(), self._controller, self._munged):
            if daemon is not None and daemon.poll() is None:
                daemon.kill()
                daemon.wait()
        kill_marked("SLURM_CONF", str(self.conf))

    def _write_files(self) -> None:
        place, host = self._place, os.uname().nodename
        key = place / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (place / "state").mkdir()
        nodes = "".join(NODE.format(name=name, host=host, port=free_port()) for name in self.nodes)
        conf = CONF.format(user=getpass.getuser(), place=place, port=free_port(), requeue_s=REQUEUE_S)
        self.conf.write_text(conf + nodes)
        (place / "gres.conf").write_text(
            "".join(f"NodeName={name} Name=gpu File={device}\n" for name in self.nodes for device in DEVICES)
        )

    def _spawn(self, *command: str, mark: str = "") -> subprocess.Popen[bytes]:
        parent = os.getpid()
        with (self._place / f"{command[0]}.out").open("ab") as out:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=lambda: die_with(parent),
                env={**os.environ, "SLURM_CONF": str(self.conf), MARK: mark},
            )  # fmt: skip


@contextlib.contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """A running cluster."""
    # Paths of sockets must be short.
    place = Path("/tmp", f"fp{secrets.token_hex(4)}")
    place.mkdir(mode=0o755)
    cluster = SlurmCluster(place)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(place, ignore_errors=True)
