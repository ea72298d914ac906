"""`python -m footplate.jobs.backends.slurm.replica FOLDER NUMBER FIRST`: run one replica, as a task of srun.

    this program ── ready ──► the entry point       two free addresses of this node
                 ◄── run ───                        the variables of each process
                 ── began ──►                       the package is installed, and the processes run
                 ◄── signal ─                       SIGTERM or SIGKILL for some roles
                 ◄── ask ────                       a question to the processes of one replica (`asking.py`)
                 ── ended ──►                       the exit code, the last line of output, and whether Slurm asked for it
                 ── alive ──►                       every `ALIVE_S`

The messages are lines of JSON on the standard streams, which srun passes on. The processes write into logs on the shared
disk. A replica has one process, or one for each GPU of its node: then they are ranks, and end together. The log has the
output of the first one, and lines of the others with their ranks.

When srun's end of the standard input closes, the entry point has ended, and the processes are killed. SIGTERM from Slurm is
passed on to them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from footplate.core.errors import FootplateError
from footplate.distributed import network_interface
from footplate.jobs import process_env
from footplate.jobs.backends.slurm import attempt_files
from footplate.jobs.backends.slurm.asking import answer_beside
from footplate.jobs.cluster_env import ReplicaId, replica_ids
from footplate.jobs.execution import Execution
from footplate.jobs.home import Home
from footplate.jobs.package import Installed, install, stored
from footplate.jobs.redaction import StreamMask, secrets
from footplate.jobs.supervision.exit_status import PEERS_S
from footplate.jobs.supervision.logfiles import Writer
from footplate.launch.hang_files import HANGS_DIR
from footplate.launch.process_lifetime import die_with, kill_group
from footplate.launch.rendezvous import free_addresses, own_address

PIECE = 1 << 16
ALIVE_S = 20.0
# Pieces of output to read after a process has ended. Its children may never stop writing.
_LEFT = 1024
_TICK_S = 0.25
# Slurm's variables that a program gets. Those of the step describe this program's task, and would confuse other libraries.
_OF_SLURM = (
    "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "SLURMD_NODENAME", "SLURM_CLUSTER_NAME",
    "SLURM_JOB_ACCOUNT", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION", "SLURM_RESTART_COUNT", "TMPDIR",
)  # fmt: skip


@dataclass
class Rank:
    """A process of the replica.

    Attributes:
        prefix: is written before each of its lines; empty for the first one.
        rest: the beginning of a line whose end hasn't arrived; empty for a lone process.
        last: the end of its output.
        asked: it was asked to end.
    """

    process: subprocess.Popen[bytes]
    pipe: io.FileIO
    prefix: bytes
    rest: bytes = b""
    last: bytes = b""
    code: int | None = None
    asked: bool = False


class Runner:
    """Runs a replica.

    Args:
        task: from `request.task`.
        position: the replica's position among all of them.
        number: the attempt's number.
        folder: the attempt's folder.
    """

    def __init__(self, task: Mapping[str, Any], position: int, number: int, folder: Path) -> None:
        self._task = task
        self._position = position
        self._number = number
        self._folder = folder
        self._execution = Execution.from_dict(task["execution"])
        self._id: ReplicaId = replica_ids(self._execution)[position]  # pyright: ignore[reportArgumentType]
        self._ranks: list[Rank] = []
        self._selector = selectors.DefaultSelector()
        self._inbox = b""
        self._closed = False
        self._kill_at = float("inf")
        self._said_at = time.monotonic()
        self._failed: Rank | None = None
        # Set by the handler of SIGTERM, which Slurm sends.
        self.stop_requested = False
        self._asked_by_slurm = False

    def run(self) -> None:
        """Run the replica until its processes have ended."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop_requested", True))
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ)
        self._say("ready", addresses=_addresses(os.environ))
        while not self._ranks and not self._closed:
            self._turn()
        if not self._closed:
            self._follow()

    def _turn(self) -> None:
        """Wait for something to do, and do it."""
        for key, _ in self._selector.select(_TICK_S):
            if key.fd == 0:
                self._read_orders()
            elif isinstance(key.data, Rank) and not self._keep(key.data):
                self._selector.unregister(key.fd)
        if self.stop_requested:
            self._signal(signal.SIGTERM)
            self.stop_requested, self._asked_by_slurm = False, True
        if time.monotonic() >= self._kill_at:
            self._signal(signal.SIGKILL)
        if time.monotonic() - self._said_at > ALIVE_S:
            self._say("alive")

    def _read_orders(self) -> None:
        try:
            data = os.read(0, PIECE)
        except BlockingIOError:
            return
        if not data:
            # The entry point has ended.
            self._selector.unregister(0)
            self._closed = True
            self._signal(signal.SIGKILL)
        *lines, self._inbox = (self._inbox + data).split(b"\n")
        for line in lines:
            self._carry_out(json.loads(line))

    def _carry_out(self, message: Mapping[str, Any]) -> None:
        if message["do"] == "run":
            try:
                self._begin(message["replicas"][self._position])
            except FootplateError as error:
                self._refuse(str(error), mistake=True)
            except OSError as error:
                self._refuse(f"{type(error).__name__}: {error}", mistake=False)
        elif message["do"] == "ask":
            if (message["role"], message["index"]) == (self._id.role, self._id.index):
                pids = [rank.process.pid for rank in self._ranks if rank.code is None]
                answer_beside(self._folder, message, pids)
        elif self._id.role in message["roles"]:
            self._signal(message["signal"])

    def _refuse(self, text: str, mistake: bool) -> None:
        self._say("refused", text=text, mistake=mistake)
        self._closed = True

    def _begin(self, described: Sequence[Mapping[str, str]]) -> None:
        """Install the package, and start the processes."""
        installed = self._install()
        common = self._variables(installed, len(described))
        self._writer = Writer(
            self._folder / f"{self._id.role}-{self._id.index}.log", stream_mask=StreamMask(secrets(common))
        )
        directory = self._execution.directory
        directory = directory if Path(directory).is_dir() else str(self._folder.parent)
        command = [str(installed.python), "-P", *self._execution.arguments]
        for local_rank, variables in enumerate(described):
            prefix = f"[rank {variables['RANK']}] ".encode() if local_rank else b""
            self._start(command, {**common, **variables}, directory, prefix)
        self._say("began")

    def _install(self) -> Installed:
        home, log = Path(self._task["home"]), io.StringIO()
        try:
            return install(stored(self._execution.package, home), home, log)
        finally:
            if text := log.getvalue():
                with (self._folder / "prepare.log").open("a") as file:
                    file.write(text)

    def _variables(self, installed: Installed, ranks: int) -> dict[str, str]:
        """The variables that all processes of the replica have."""
        before = process_env.read(Home(Path(self._task["home"])).job(self._execution.name), os.environ)
        ours = {name: os.environ[name] for name in _OF_SLURM if name in os.environ}
        cores = int(os.environ.get("SLURM_CPUS_PER_TASK") or 1)
        variables = {
            "OMP_NUM_THREADS": str(max(1, cores // ranks)),
            **before,
            **installed.env,
            "PYTHONPATH": os.pathsep.join(filter(None, [installed.env.get("PYTHONPATH"), before.get("PYTHONPATH")])),
            **ours,
            "PYTHONUNBUFFERED": "1",
            "FOOTPLATE_JOB_ID": self._task["job"],
            "FOOTPLATE_JOB_ATTEMPT": str(self._number),
            HANGS_DIR: str(self._folder),
        }
        network = network_interface.with_address(_address(os.environ))
        # Otherwise gloo uses the address of the node's name, which other nodes may not reach.
        if network:
            variables.setdefault("GLOO_SOCKET_IFNAME", network)
        return variables

    def _start(self, command: Sequence[str], environ: Mapping[str, str], directory: str, prefix: bytes) -> None:
        ours, theirs = os.pipe()
        parent = os.getpid()
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=dict(environ), cwd=directory,
                start_new_session=True, preexec_fn=lambda: die_with(parent),
            )  # fmt: skip
        finally:
            os.close(theirs)
        os.set_blocking(ours, False)
        rank = Rank(process, os.fdopen(ours, "rb", buffering=0), prefix)
        self._ranks.append(rank)
        self._selector.register(rank.pipe, selectors.EVENT_READ, rank)
        # The end of the process wakes the selector. Without pidfd, the next tick shows it.
        if hasattr(os, "pidfd_open"):
            self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, process.pid)

    def _follow(self) -> None:
        """Follow the processes until all have ended."""
        while True:
            for rank in self._ranks:
                if rank.code is None and rank.process.poll() is not None:
                    self._end(rank)
            if all(rank.code is not None for rank in self._ranks):
                break
            self._turn()
        last = self._failed or self._ranks[0]
        self._writer.close()
        lines = [line.strip() for line in last.last.decode("utf-8", "replace").splitlines()]
        last_line = next((line for line in reversed(lines) if line), "")
        self._say("ended", code=last.code, last=last_line, asked_by_slurm=self._asked_by_slurm or self.stop_requested)

    def _end(self, rank: Rank) -> None:
        """Handle the end of a process: read its remaining output. If it failed, the others have a moment to end."""
        kill_group(rank.process.pid)
        for _ in range(_LEFT):
            if not self._keep(rank):
                break
        self._write(rank, rank.rest)
        rank.rest, rank.code = b"", rank.process.returncode
        for key in [key for key in self._selector.get_map().values() if key.data in (rank, rank.process.pid)]:
            self._selector.unregister(key.fd)
            if key.data is not rank:
                os.close(key.fd)
        rank.pipe.close()
        if rank.code and self._failed is None:
            self._failed = rank
            self._kill_at = min(self._kill_at, time.monotonic() + PEERS_S)

    def _keep(self, rank: Rank) -> bool:
        """Keep a piece of output. Returns True if there was one."""
        data = rank.pipe.read(PIECE)
        if not data:
            return data is None and rank.process.poll() is None
        # A lone process may write a part of a line. Lines of several ranks must stay whole.
        data = rank.rest + data
        end = len(data) if len(self._ranks) == 1 else 1 + max(data.rfind(b"\n"), data.rfind(b"\r"))
        rank.rest = data[end:]
        self._write(rank, data[:end])
        return True

    def _write(self, rank: Rank, data: bytes) -> None:
        if not data:
            return
        rank.last = (rank.last + data)[-4096:]
        if len(self._ranks) > 1:
            data = b"".join(rank.prefix + line for line in data.splitlines(keepends=True))
            data += b"" if data.endswith((b"\n", b"\r")) else b"\n"
        self._writer.write(data)

    def _signal(self, signum: int) -> None:
        for rank in self._ranks:
            if rank.code is not None:
                continue
            if signum == signal.SIGKILL:
                kill_group(rank.process.pid)
            # Slurm asks all tasks, and so does the entry point.
            elif not rank.asked:
                rank.asked = True
                with contextlib.suppress(ProcessLookupError):
                    rank.process.send_signal(signum)

    def _say(self, event: str, **values: Any) -> None:
        self._said_at = time.monotonic()
        data = json.dumps({"event": event, "task": self._position, **values}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(1, data) :]


def _address(environ: Mapping[str, str]) -> str:
    """The address of this node on the way to the node of the entry point."""
    launcher = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    address = "127.0.0.1"
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused:
        # Sends nothing.
        unused.connect((launcher, 9))
        address = unused.getsockname()[0]
    return own_address(address)


def _addresses(environ: Mapping[str, str]) -> tuple[str, ...]:
    return free_addresses(_address(environ), 2)


def main(folder: Path, number: int, first: int, environ: Mapping[str, str] = os.environ) -> None:
    """Run the replica of this task."""
    task = json.loads((folder.with_name(f"attempt-{first}") / attempt_files.TASK).read_text())
    Runner(task, int(environ["SLURM_PROCID"]), number, folder).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
