"""The Ray actor that runs one replica on a node: it installs the package, starts the process, and passes on its output.

    entry point ── run(task) ──► install ──► the process, leader of its own process group
                ── poll(last) ──► new messages, within a second: the answer is also the heartbeat
                ── send_signal(SIGTERM), send_signal(SIGKILL)
    question.py ── ask("stacks", …), from another Ray Job of the same user: where the process is, or a profile
                ── end_following(), when it knows the end of a profile
                ── clean() ──► delete what attempts left on the node and what has been unused for a week

`poll` names the last answer that arrived. Messages of an answer that didn't arrive are sent again, so a broken connection
loses no output. Output that nobody fetches stays in the pipe, and the program waits.

The process dies with its actor, and the rest of its group with it. An actor dies with the entry point, and with its node.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from footplate.core.errors import ConfigError, FootplateError, Unavailable
from footplate.jobs.tuning.report_lines import NewLines
from footplate.jobs.tuning.trial_jobs import trial_variables
from footplate.launch.hang_files import HANGS_DIR, hang_files
from footplate.launch.process_lifetime import die_with, kill_group

if TYPE_CHECKING:
    from footplate.jobs.home import Home

# Number of bytes that are read at once.
PIECE = 1 << 15
ANSWER_S = 1.0
MAX_HANG_CHARACTERS = 200_000
# The threads for questions. They leave those for the entry point's calls alone.
QUESTIONS = "questions"
QUESTIONS_AT_ONCE = 4
# After the end of its process, a profile that somebody follows has this time to be reported.
PROFILE_S = 15.0
# A process that waits for a profile asks for its status several times in this time.
FOLLOWED_S = 5.0
_OF_PROFILES = ("request_profile", "profile_status")
# Messages that wait to be fetched.
_HELD = 16
# Pieces of output to read after a process has ended. Its children may never stop writing.
_LEFT = 1024
_TICK_S = 0.25
_PAUSE_S = 0.05


@dataclass(frozen=True)
class ReplicaTask:
    """A replica to run.

    Attributes:
        package: the archive of the program, in the job's working directory.
        digest: the archive's digest.
        arguments: the interpreter's arguments.
        environment: variables that override those of the node.
        directory: the directory to run in, if the node has it.
        key: the attempt's key.
        role: of the replica.
        index: its number within the role.
        trial: the trial that the job is, as `Execution.trial`; None if it is no trial.
    """

    package: str
    digest: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    key: str
    role: str
    index: int
    trial: Mapping[str, Any] | None


@dataclass(frozen=True)
class Message:
    """A message of an actor. `kind` is "output", "prepare", "reports", "hypertune", "began", "hang", "ended" or "refused".

    Attributes:
        data: output of the process or of the installation, or lines of a trial's reports.
        code: the process's exit code, or a signal's number made negative.
        text: why the process wasn't started; for a hang, the stacks of all ranks.
        mistake: a retry won't help.
    """

    kind: str
    data: bytes = b""
    code: int = 0
    text: str = ""
    mistake: bool = False


@dataclass(frozen=True)
class Answer:
    """The answer to a question: its value, or an error.

    Attributes:
        value: the value.
        error: the text of a ConfigError.
        unavailable: the error is `Unavailable`.
    """

    value: Any = None
    error: str = ""
    unavailable: bool = False


class ReplicaActor:
    """Runs a replica. Each call of a method runs in its own thread."""

    def __init__(self) -> None:
        self._messages: queue.Queue[Message] = queue.Queue(_HELD)
        self._answer: tuple[int, list[Message]] = (0, [])
        # A call whose connection broke may still run when it is repeated.
        self._polling = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._last_signal: int | None = None
        self._hangs = 0  # those that were passed on
        # When a profile was last asked for, on the monotonic clock; None if nobody waits for its end.
        self._followed_at: float | None = None
        # The questions about profiles that are being answered.
        self._questions = 0
        self._counting = threading.Lock()

    def node_and_addresses(self, ports: int) -> tuple[str, list[str]]:
        """The node's id, and `ports` of its free addresses."""
        import ray

        from footplate.launch.rendezvous import free_addresses

        return ray.get_runtime_context().get_node_id(), list(free_addresses(ray.util.get_node_ip_address(), ports))

    def run(self, task: ReplicaTask) -> None:
        """Run the replica: install the package, run the process until it ends."""
        try:
            self._run(task)
        except FootplateError as error:
            self._messages.put(Message("refused", text=str(error), mistake=True))
        except Exception as error:
            self._messages.put(Message("refused", text=f"{type(error).__name__}: {error}"))

    def poll(self, last: int) -> tuple[int, list[Message]]:
        """Return the messages after answer `last`, and the new answer's number. Waits for `ANSWER_S` at most."""
        with self._polling:
            if last == self._answer[0]:
                self._answer = (last + 1, self._next())
            return self._answer

    def send_signal(self, signum: int) -> None:
        """Send a signal to the process, or SIGKILL to its whole group. A process that doesn't run yet won't start."""
        self._last_signal = signum
        if self._process is not None and self._process.poll() is None:
            if signum == signal.SIGKILL:
                kill_group(self._process.pid)
            else:
                self._process.send_signal(signum)

    def ask(self, question: str, *arguments: Any) -> Answer:
        """Ask the process, and those below it: `question` is a method of `jobs.questions.ProcessesHere`."""
        from footplate.jobs.questions import ProcessesHere

        runs = self._process is not None and self._process.poll() is None
        here = ProcessesHere([self._process.pid] if runs and self._process is not None else [])
        of_profile = question in _OF_PROFILES
        self._count(of_profile)
        try:
            answer = Answer(getattr(here, question)(*arguments))
            if of_profile:
                self._followed_at = time.monotonic()
        except ConfigError as error:
            return Answer(error=str(error), unavailable=isinstance(error, Unavailable))
        finally:
            self._count(-of_profile)
        return answer

    def end_following(self) -> None:
        """Note that the end of a profile has arrived where it was asked for. Until then, an answer may get lost."""
        self._followed_at = None

    def clean(self) -> None:
        """Delete what no job needs on the node."""
        from footplate.jobs.home import Home
        from footplate.jobs.supervision.cleaning import clean_node

        clean_node(Home.from_env())

    def _count(self, questions: int) -> None:
        with self._counting:
            self._questions += questions

    def _next(self) -> list[Message]:
        messages: list[Message] = []
        with contextlib.suppress(queue.Empty):
            messages.append(self._messages.get(timeout=ANSWER_S))
            while len(messages) < _HELD:
                messages.append(self._messages.get_nowait())
        return messages

    def _run(self, task: ReplicaTask) -> None:
        from ray.util import get_node_ip_address

        from footplate.jobs.home import Home
        from footplate.jobs.package import Snapshot, install

        home = Home.from_env()
        archive = Path(task.package).absolute()
        installed = install(Snapshot(task.digest, archive, ()), home.root, cast("TextIO", _Preparing(self._messages)))
        try:
            with _directory(task, home) as directory, tempfile.TemporaryDirectory(prefix="footplate-replica-") as own:
                command = [str(installed.python), "-P", *task.arguments]
                variables = {**_variables(task, installed.env, get_node_ip_address()), HANGS_DIR: own}
                if task.trial is not None:
                    variables |= trial_variables(task.trial, Path(own), task.role, task.index)
                self._look_after(command, variables, directory)
        finally:
            installed.release()

    def _look_after(self, command: Sequence[str], variables: Mapping[str, str], directory: Path) -> None:
        if self._last_signal is not None:
            self._messages.put(Message("ended", code=-self._last_signal))
            return

        ours, theirs = os.pipe()
        actor = os.getpid()
        try:
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=dict(variables), cwd=directory,
                start_new_session=True, preexec_fn=lambda: die_with(actor),
            )  # fmt: skip
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)

        self._messages.put(Message("began"))
        # The signal came while the program was being started.
        if self._last_signal is not None:
            self.send_signal(self._last_signal)

        os.set_blocking(ours, False)
        with os.fdopen(ours, "rb", buffering=0) as pipe, selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            ended = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
            # The end of the process wakes the selector.
            if ended is not None:
                selector.register(ended, selectors.EVENT_READ)
            reports = NewLines(Path(variables[HANGS_DIR]))
            while process.poll() is None:
                ready = [key.fileobj for key, _ in selector.select(_TICK_S)]
                if pipe in ready and not self._pass_on(pipe):
                    selector.unregister(pipe)
                self._pass_on_hangs(Path(variables[HANGS_DIR]))
                self._pass_on_reports(reports)
            if ended is not None:
                os.close(ended)

            # Children of the program may still hold the pipe. Pass on what they have written, within limits.
            kill_group(process.pid)
            for _ in range(_LEFT):
                if not self._pass_on(pipe):
                    break
        self._pass_on_hangs(Path(variables[HANGS_DIR]))
        self._pass_on_reports(reports)
        self._await_profile()
        self._messages.put(Message("ended", code=process.returncode))

    def _await_profile(self) -> None:
        """Wait until somebody who follows a profile knows its end. After the last replica, nobody can ask this actor.

        On a busy node, one answer may take longer than several do usually.
        """
        until = time.monotonic() + PROFILE_S
        while time.monotonic() < until and (self._questions or self._is_followed()):
            time.sleep(_PAUSE_S)

    def _is_followed(self) -> bool:
        followed_at = self._followed_at
        return followed_at is not None and time.monotonic() < followed_at + FOLLOWED_S

    def _pass_on(self, pipe: io.FileIO) -> bool:
        """Pass on a piece of output. Returns True if there was one."""
        data = pipe.read(PIECE)
        if data:
            self._messages.put(Message("output", data))
        return bool(data)

    def _pass_on_hangs(self, directory: Path) -> None:
        """Pass on hangs that a launch in the process has explained, each once."""
        for file in hang_files(directory)[self._hangs :]:
            self._hangs += 1
            self._messages.put(Message("hang", text=file.read_text(errors="replace")[:MAX_HANG_CHARACTERS]))

    def _pass_on_reports(self, reports: NewLines) -> None:
        for source, lines in reports.read():
            self._messages.put(Message(source, lines))


class _Preparing(io.TextIOBase):
    """The log of the installation. It becomes messages."""

    def __init__(self, messages: queue.Queue[Message]) -> None:
        self._messages = messages

    def write(self, text: str) -> int:
        self._messages.put(Message("prepare", text.encode()))
        return len(text)


def _variables(task: ReplicaTask, installed: Mapping[str, str], address: str) -> dict[str, str]:
    """The environment of the process: allowed variables of the node, the job's variables, and the package's."""
    from footplate.distributed import network_interface
    from footplate.jobs import process_env

    before = {**process_env.lasting(os.environ), **process_env.credentials(os.environ)}
    variables = {
        **before,
        **task.environment,
        **installed,
        "PYTHONPATH": os.pathsep.join(filter(None, [installed["PYTHONPATH"], before.get("PYTHONPATH")])),
        **{name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ},
    }
    network = network_interface.with_address(address)
    # Otherwise gloo uses the address of the node's name, which other nodes may not reach.
    if network:
        variables.setdefault("GLOO_SOCKET_IFNAME", network)
    return variables


@contextlib.contextmanager
def _directory(task: ReplicaTask, home: Home) -> Iterator[Path]:
    """The directory of the submission, if the node has it; otherwise a directory of the attempt, locked while in use."""
    from footplate.jobs.package.environment_locks import Hold

    directory = Path(task.directory)
    if directory.is_dir():
        yield directory
        return
    directory = home.node_directory(task.key)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    hold = Hold(directory.with_suffix(".lock"))
    try:
        yield directory
    finally:
        # The program may have deleted its directory.
        with contextlib.suppress(OSError):
            # The modification time is the time of its last use.
            os.utime(directory)
        hold.release()
