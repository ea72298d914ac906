"""Forks that wait for their order, and then become the program of an attempt.

A supervisor that the fork server has forked makes these forks at once, before it does anything else. So the program finds
the fork server's state, and nothing of its supervisor: no open file, no handler, no lock. Later the supervisor calls
`start` in place of `subprocess.Popen`. A fork that gets no order ends with its supervisor.

The program runs as `python -P -m MODULE …` runs it: in a session of its own, in a new `__main__`. At its end, threads are
waited for and `atexit` is done, as an interpreter does it (`launch/program_end.py`).
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import socket
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from footplate.jobs.fork_server.environment import Marker
from footplate.launch import wire
from footplate.launch.process_lifetime import die_with
from footplate.launch.program_end import end_program, exit_code

log = logging.getLogger(__name__)

_RUNPY = "<frozen runpy>"
_INTERPRETER = "-P", "-m"


@dataclass(frozen=True)
class Origin:
    """What a fork was made from, and what a program must have in common with it.

    Attributes:
        python: the interpreter.
        base: the variables at the time of the imports.
        reads: the names of the variables that imports asked for.
    """

    python: str
    base: Mapping[str, str]
    reads: frozenset[str]

    def why_not(self, command: Sequence[str], base: Mapping[str, str], environment: Mapping[str, str]) -> str:
        """Explain why a fork wouldn't be what the command starts; empty if it would.

        Args:
            command: the interpreter and its arguments.
            base: the part of the environment that all processes of this package have.
            environment: the whole environment.
        """
        if tuple(command[:3]) != (self.python, *_INTERPRETER):
            return f"its command is {' '.join(command[:3])}"
        if base != self.base:
            names = sorted(name for name in {*base, *self.base} if base.get(name) != self.base.get(name))
            return f"these variables have changed: {', '.join(names)}"
        own = {name for name, value in environment.items() if base.get(name) != value}
        if read := sorted(own & self.reads):
            return f"an import has read {', '.join(read)}"
        return ""


class ForkedProgram:
    """A program that runs in a fork of this process. Its methods are those of `subprocess.Popen`.

    Attributes:
        pid: its process id.
        returncode: its exit code, or a signal's number made negative; None while it runs.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._collect(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        code = self._collect(0)
        assert code is not None
        return code

    def terminate(self) -> None:
        """Send SIGTERM, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def _collect(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@dataclass(frozen=True)
class _Waiting:
    """A fork that waits for its order."""

    process: ForkedProgram
    connection: socket.socket


class Programs:
    """The waiting forks of a supervisor.

    Args:
        origin: what they were made from.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._waiting: list[_Waiting] = []

    def fork(self, marker: Marker) -> Callable[[], None] | None:
        """Fork a process that waits. Returns None in this process, and in the fork what it must call."""
        ours, theirs = socket.socketpair()
        supervisor = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            self._waiting.append(_Waiting(ForkedProgram(pid), ours))
            return None
        for connection in (ours, *(waiting.connection for waiting in self._waiting)):
            connection.close()
        return lambda: _await_order(theirs, supervisor, marker)

    def start(
        self,
        command: Sequence[str],
        base: Mapping[str, str],
        environment: Mapping[str, str],
        directory: str,
        output: int,
    ) -> ForkedProgram | None:
        """Make a waiting fork the program of an attempt; return None if there is none, or if it wouldn't be the same.

        Args:
            command: the interpreter and its arguments.
            base: the part of the environment that all processes of this package have.
            environment: the whole environment.
            directory: the current directory of the program.
            output: the descriptor for its output.
        """
        if not self._waiting:
            return None
        if why := self._origin.why_not(command, base, environment):
            log.warning("the program begins in a new interpreter: %s", why)
            self._end()
            return None
        waiting = self._waiting.pop()
        own = {name: value for name, value in environment.items() if base.get(name) != value}
        order = {"arguments": list(command[1:]), "environment": own, "directory": directory}
        with waiting.connection as connection:
            # It leads its own process group when it says so, and can be killed with all that it starts.
            if wire.receive(connection) is None:
                waiting.process.wait()
                return None
            wire.send(connection, order, [output])
        return waiting.process

    def _end(self) -> None:
        for waiting in self._waiting:
            waiting.connection.close()
            waiting.process.wait()
        self._waiting.clear()


_programs: Programs | None = None


def use(programs: Programs) -> None:
    """Let `start` use these forks. A supervisor calls this once."""
    global _programs
    _programs = programs


def start(
    command: Sequence[str], base: Mapping[str, str], environment: Mapping[str, str], directory: str, output: int
) -> ForkedProgram | None:
    """Start a program as `Programs.start` does; return None in a supervisor that has no forks."""
    return None if _programs is None else _programs.start(command, base, environment, directory, output)


def _await_order(connection: socket.socket, supervisor: int, marker: Marker) -> None:
    """Wait for the order, and run the program. The process ends without an order."""
    os.setsid()
    die_with(supervisor)
    with connection:
        wire.send(connection, {"event": "waits"})
        received = wire.receive(connection)
    if received is None:
        os._exit(0)
    order, (output,) = received
    _become(order, output, marker)
    _run(order["arguments"])


def _become(order: Mapping[str, Any], output: int, marker: Marker) -> None:
    """Give this process the output, directory and variables of its program."""
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.chdir(order["directory"])
    for name, value in order["environment"].items():
        if name == marker.name:
            marker.set(value)
        else:
            os.environ[name] = value
    # Python's own generator does so itself. A new interpreter's generator of NumPy begins anywhere, too.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _run(arguments: Sequence[str]) -> None:
    """Run the program in a new `__main__`, as the interpreter does for these arguments."""
    module, *words = arguments[len(_INTERPRETER) :]
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv[:] = ["-m", *words]
    sys.modules["__main__"] = types.ModuleType("__main__")
    code = 0
    try:
        runpy._run_module_as_main(module)  # pyright: ignore[reportAttributeAccessIssue]
    except KeyboardInterrupt:
        raise
    except SystemExit as end:
        code = exit_code(end)
    except BaseException as error:
        _show(error)
        code = 1
    end_program(code)


def _show(error: BaseException) -> None:
    """Show an error as a new interpreter does: its traceback begins with runpy."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != _RUNPY:
        frames = frames.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
    with suppress(Exception):
        sys.excepthook(type(error), error.with_traceback(frames), frames)
