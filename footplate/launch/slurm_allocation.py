"""The nodes and processes that Slurm has allocated to `footplate run`, from Slurm's variables.

    sbatch --nodes=1 --gpus-per-node=8 --wrap "footplate run train.py"
    sbatch --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --wrap "srun footplate run train.py"

On one node the command may be the batch script itself, or one task of srun. On several nodes it is one task on each. Each
node has a process for each of its GPUs. Without GPUs it has a process for each task that was asked for, or else for each
core: `--cpus-per-task` cores make one process.

The machines of a launch need a port and a secret. Machine 0 chooses both, and writes them into a file in Footplate's home,
which the nodes share as they share home directories. With `FOOTPLATE_TOKEN` there is no file, and the port follows from the
job's id.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from footplate.core.errors import ConfigError
from footplate.launch.rendezvous import free_addresses

FIRST_PORT, PORTS = 20000, 10000
# Time for machine 0 to write the meeting point, and for other nodes to see it.
MEETING_S = 120.0
_POLL_S = 0.2
# Steps of one job get ports that are apart.
_STEP = 1009


@dataclass(frozen=True)
class Allocation:
    """The part of a Slurm job in which a command runs.

    Attributes:
        job: the job's id.
        step: the step's id; None in the batch script.
        start: how often Slurm has started the job, from 1.
        nodes: the number of nodes.
        node_rank: the number of this node.
        per_node: the processes for each node.
        first_node: the name of the first node.
    """

    job: int
    step: int | None
    start: int
    nodes: int
    node_rank: int
    per_node: int
    first_node: str

    @property
    def port(self) -> int:
        """A port for the rendezvous that all nodes know. Another job, or another program, may use it."""
        return FIRST_PORT + (self.job + _STEP * (self.step or 0)) % PORTS

    @property
    def job_variables(self) -> dict[str, str]:
        """The variables by which a trainer resumes after Slurm has requeued the job."""
        step = "" if self.step is None else f".{self.step}"
        return {"FOOTPLATE_JOB_ID": f"slurm-{self.job}{step}", "FOOTPLATE_JOB_ATTEMPT": str(self.start)}


def allocation(environ: Mapping[str, str], command: str) -> Allocation | None:
    """Read Slurm's variables; None outside of an allocation.

    Args:
        environ: the environment.
        command: the command, for errors.

    Raises:
        ConfigError: the command runs more than once on a node, or on one of several nodes only.
    """
    # A job of Footplate's own backend has no SLURM_NODEID: its variables describe the ranks already.
    if "SLURM_JOB_ID" not in environ or "SLURM_NODEID" not in environ:
        return None
    step = environ.get("SLURM_STEP_ID")
    in_step = step is not None and step.isdigit()
    nodes = int(environ.get("SLURM_STEP_NUM_NODES" if in_step else "SLURM_NNODES") or 1)
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or 1) if in_step else 1
    if tasks > nodes:
        raise ConfigError(
            f"srun has started {tasks} tasks on {nodes} {'node' if nodes == 1 else 'nodes'}, and each would start "
            f"processes of its own. Start one on each node: srun --ntasks-per-node=1 {command}"
        )
    if not in_step and nodes > 1:
        raise ConfigError(
            f"this allocation has {nodes} nodes, and the batch script runs on the first only. Start the command on each: "
            f"srun --ntasks-per-node=1 {command}"
        )
    node_list = environ.get("SLURM_STEP_NODELIST" if in_step else "SLURM_JOB_NODELIST", "")
    return Allocation(
        int(environ["SLURM_JOB_ID"]),
        int(step or 0) if in_step else None,
        int(environ.get("SLURM_RESTART_COUNT") or 0) + 1,
        nodes,
        int(environ["SLURM_NODEID"]) if in_step else 0,
        _per_node(environ, in_step),
        first_host(node_list) or environ.get("SLURMD_NODENAME", ""),
    )


def _per_node(environ: Mapping[str, str], in_step: bool) -> int:
    gpus = int(environ.get("SLURM_GPUS_ON_NODE") or 0)
    if gpus:
        return gpus
    # In a step, these variables describe the step, which has one task here.
    asked = 0 if in_step else int(environ.get("SLURM_NTASKS_PER_NODE") or environ.get("SLURM_NTASKS") or 0)
    cores = int(environ.get("SLURM_CPUS_ON_NODE") or 1) // int(environ.get("SLURM_CPUS_PER_TASK") or 1)
    return max(1, asked if asked > 1 else cores)


def first_host(node_list: str) -> str:
    """The first name in a list of Slurm's.

    >>> first_host("gpu[003-007,12],login"), first_host("n1"), first_host("rack[1-2]node[08,09]"), first_host("a,b")
    ('gpu003', 'n1', 'rack1node08', 'a')
    """
    name = ""
    for match in re.finditer(r"\[([^\]]*)\]|([^\[,]+)|,", node_list):
        numbers, text = match.groups()
        if numbers is None and text is None:
            break
        name += text if text is not None else re.split(r"[-,]", numbers or "")[0]
    return name


def address_of(node: str) -> str:
    """The address of a node: its name, if that can be resolved, or else the address that Slurm uses.

    Raises:
        ConfigError: there is neither.
    """
    with suppress(OSError):
        socket.getaddrinfo(node, None)
        return node
    described = ""
    with suppress(OSError):
        described = subprocess.run(["scontrol", "show", "node", node], capture_output=True, text=True).stdout
    match = re.search(r"NodeAddr=(\S+)", described)
    if match is None:
        raise ConfigError(f"{node}, the first node, has no address here. Give one with --master-addr.")
    return match[1]


@dataclass(frozen=True)
class Meeting:
    """The meeting point of a step's machines.

    Attributes:
        port: the port of machine 0.
        token: the secret of the launch.
    """

    port: int
    token: str

    @classmethod
    def new(cls, address: str) -> Meeting:
        """Choose a port that is free now, and a secret. Call this on machine 0, with its address."""
        port = FIRST_PORT + secrets.randbelow(PORTS)
        # An address that isn't this machine's is an error later, with more to say.
        with suppress(OSError):
            (free,) = free_addresses(address, 1)
            port = int(free.rpartition(":")[2])
        return cls(port, secrets.token_urlsafe(32))

    @classmethod
    def read(cls, path: Path) -> Meeting:
        """Read what machine 0 has written. Waits for it.

        Raises:
            ConfigError: it doesn't come.
        """
        until = time.monotonic() + MEETING_S
        while time.monotonic() < until:
            # Listing the folder shows a new file earlier than asking for it: NFS remembers what wasn't there.
            with suppress(OSError):
                if path in path.parent.iterdir():
                    return cls(**json.loads(path.read_text()))
            time.sleep(_POLL_S)
        raise ConfigError(
            f"the first node has written no {path} in {MEETING_S:g} s. Set FOOTPLATE_HOME to a folder that all nodes "
            "share, or FOOTPLATE_TOKEN to a secret, before srun."
        )

    def write(self, path: Path) -> None:
        """Write it for the other machines. Delete the file when the launch has ended.

        Raises:
            ConfigError: it can't be written.
        """
        draft = path.with_name(f".{path.name}.part")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(asdict(self), file)
            draft.replace(path)
        except OSError as error:
            raise ConfigError(
                f"{path} can't be written: {error.strerror}. Set FOOTPLATE_HOME to a folder that all nodes share, or "
                "FOOTPLATE_TOKEN to a secret of your own."
            ) from None


def meeting_file(environ: Mapping[str, str]) -> Path:
    """The file with the meeting point of a step. No other step has the same one, not even one of a job with the same id."""
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_LAUNCHER_PORT")
    digest = hashlib.sha256("\0".join(environ.get(name, "") for name in names).encode()).hexdigest()[:16]
    home = Path(environ.get("FOOTPLATE_HOME") or "~/.footplate").expanduser()
    return home / "slurm" / f"{environ.get('SLURM_JOB_ID')}-{digest}"
