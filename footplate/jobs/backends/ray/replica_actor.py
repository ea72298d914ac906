"""The actor that runs one replica of a job on a node: installs the package there, starts the process, passes on its output.

    driver ── run(order) ──► install ──► the process, leader of a group of its own
           ── hear(last) ──► what has come since, after a second at the latest: its answer is also the sign of life
           ── tell(SIGTERM), tell(SIGKILL)
           ── clean() ──► what attempts have left on the node and none has used for a week, deleted while this one runs

`hear` names the last answer that came through. What was said in one that didn't is said again, so that no output is lost
with a broken connection. Output that nobody fetches stays in the pipe, and the program waits.

The process dies with its actor, and what it has left of its group with it; an actor dies with its driver and with its
node.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import selectors
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from footplate.core.errors import FootplateError
from footplate.launch.family import die_with, kill_group

if TYPE_CHECKING:
    from footplate.jobs.home import Home

PIECE = 1 << 15  # bytes
ANSWER_S = 1.0
_HELD = 16  # pieces that wait to be fetched
_LEFT = 1024  # pieces that are read of a process that has ended: what it has left running may write for ever
_TICK_S = 0.25


@dataclass(frozen=True)
class ReplicaTask:
    """A replica that is to run.

    Attributes:
        package: the archive of the program, below the job's working directory.
        digest: of the archive.
        arguments: what follows the interpreter.
        environment: variables over those of the node.
        directory: where it runs, if the node has it.
        key: of the attempt.
    """

    package: str
    digest: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    key: str


@dataclass(frozen=True)
class Message:
    """What an actor says: `kind` is "output", "prepare", "began", "ended" or "refused".

    Attributes:
        data: output, of the process or of the installation.
        code: the process's exit code, or a signal's number made negative.
        text: why nothing was started.
        mistake: whether trying again wouldn't mend it.
    """

    kind: str
    data: bytes = b""
    code: int = 0
    text: str = ""
    mistake: bool = False


class ReplicaActor:
    """See the module's docstring. Its methods run in threads of their own."""

    def __init__(self) -> None:
        self._said: queue.Queue[Message] = queue.Queue(_HELD)
        self._answer: tuple[int, list[Message]] = (0, [])
        self._hearing = threading.Lock()  # a call whose connection broke may be at it still when it is repeated
        self._process: subprocess.Popen[bytes] | None = None
        self._told: int | None = None

    def where(self, ports: int) -> tuple[str, list[str]]:
        """The node's id, and so many of its addresses at which nobody listens."""
        import ray

        from footplate.launch.rendezvous import free_addresses

        return ray.get_runtime_context().get_node_id(), list(free_addresses(ray.util.get_node_ip_address(), ports))

    def run(self, order: ReplicaTask) -> None:
        """Run the replica, from its installation to its end."""
        try:
            self._run(order)
        except FootplateError as error:
            self._said.put(Message("refused", text=str(error), mistake=True))
        except Exception as error:
            self._said.put(Message("refused", text=f"{type(error).__name__}: {error}"))

    def hear(self, last: int) -> tuple[int, list[Message]]:
        """What came after answer `last`, and the number of this one; waits `ANSWER_S` for it."""
        with self._hearing:
            if last == self._answer[0]:
                self._answer = (last + 1, self._next())
            return self._answer

    def tell(self, signum: int) -> None:
        """Send the process a signal, SIGKILL to all of its group; one that doesn't run yet won't begin."""
        self._told = signum
        if self._process is not None and self._process.poll() is None:
            if signum == signal.SIGKILL:
                kill_group(self._process.pid)
            else:
                self._process.send_signal(signum)

    def clean(self) -> None:
        """Delete what nobody needs on the node any more."""
        from footplate.jobs.home import Home
        from footplate.jobs.supervision.cleaning import clean_node

        clean_node(Home.from_env())

    def _next(self) -> list[Message]:
        found: list[Message] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._said.get(timeout=ANSWER_S))
            while len(found) < _HELD:
                found.append(self._said.get_nowait())
        return found

    def _run(self, order: ReplicaTask) -> None:
        from ray.util import get_node_ip_address

        from footplate.jobs.home import Home
        from footplate.jobs.package import Snapshot, install

        home = Home.from_env()
        archive = Path(order.package).absolute()
        installed = install(Snapshot(order.digest, archive, ()), home.root, cast("TextIO", _Preparing(self._said)))
        try:
            with _directory(order, home) as place:
                command = [str(installed.python), "-P", *order.arguments]
                self._look_after(command, _variables(order, installed.env, get_node_ip_address()), place)
        finally:
            installed.release()

    def _look_after(self, command: Sequence[str], variables: Mapping[str, str], place: Path) -> None:
        if self._told is not None:
            self._said.put(Message("ended", code=-self._told))
            return
        ours, theirs = os.pipe()
        actor = os.getpid()
        try:
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=dict(variables), cwd=place,
                start_new_session=True, preexec_fn=lambda: die_with(actor),
            )  # fmt: skip
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._said.put(Message("began"))
        if self._told is not None:  # meanwhile
            self.tell(self._told)
        os.set_blocking(ours, False)
        with os.fdopen(ours, "rb", buffering=0) as pipe, selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            ended = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
            if ended is not None:  # its end wakes us
                selector.register(ended, selectors.EVENT_READ)
            while process.poll() is None:
                ready = [key.fileobj for key, _ in selector.select(_TICK_S)]
                if pipe in ready and not self._pass_on(pipe):
                    selector.unregister(pipe)
            if ended is not None:
                os.close(ended)
            kill_group(process.pid)
            for _ in range(_LEFT):
                if not self._pass_on(pipe):
                    break
        self._said.put(Message("ended", code=process.returncode))

    def _pass_on(self, pipe: io.FileIO) -> bool:
        """Pass on a piece of output; whether there was one."""
        data = pipe.read(PIECE)
        if data:
            self._said.put(Message("output", data))
        return bool(data)


class _Preparing(io.TextIOBase):
    """Where the installation says what it does."""

    def __init__(self, said: queue.Queue[Message]) -> None:
        self._said = said

    def write(self, text: str) -> int:
        self._said.put(Message("prepare", text.encode()))
        return len(text)


def _variables(order: ReplicaTask, installed: Mapping[str, str], address: str) -> dict[str, str]:
    """All that the process gets: the node's, by the list that holds everywhere, the job's, and the package's."""
    from footplate.jobs import process_env
    from footplate.launch.rendezvous import interface

    before = {**process_env.lasting(os.environ), **process_env.credentials(os.environ)}
    found = {
        **before,
        **order.environment,
        **installed,
        "PYTHONPATH": os.pathsep.join(filter(None, [installed["PYTHONPATH"], before.get("PYTHONPATH")])),
        **{name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ},
    }
    network = interface(address)
    if network:  # else gloo takes what the node's name leads to, which may be no address for others
        found.setdefault("GLOO_SOCKET_IFNAME", network)
    return found


@contextlib.contextmanager
def _directory(order: ReplicaTask, home: Home) -> Iterator[Path]:
    """The one that the job was submitted in, if the node has it, or one of the attempt's own, held while it is used."""
    from footplate.jobs.package.environment_locks import Hold

    place = Path(order.directory)
    if place.is_dir():
        yield place
        return
    place = home.guest(order.key)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    hold = Hold(place.with_suffix(".lock"))
    try:
        yield place
    finally:
        with contextlib.suppress(OSError):  # which the program may have deleted
            os.utime(place)  # its last use
        hold.release()
