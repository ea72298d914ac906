"""`footplate` commands on machines of a lab that find torch and the trainer imported.

    command = warm_commands.start(machine, ["run", "--np", 2, …], env, log)

is `machine.start(["footplate", "run", "--np", 2, …], env, output=log)`, but forks the tests' template (`template.py`).
A fresh interpreter on each machine would need two to four seconds of processor time to import them. The fork does what
`nsenter` does: it enters the namespaces of the machine, forks the command there, waits for it, and ends as it ends. The
command's fork servers are forks, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import template

from footplate.lab import Command, Machine, namespaces
from footplate.lab.machine import HOME, OWN_NAMESPACES, command_environment

_PROGRAM = "import warm_commands; warm_commands.enter_and_run()"
# The names of the kernel for the kinds of namespaces that differ from those of `nsenter`.
_KERNEL_NAMES = {"mount": "mnt"}


def start(machine: Machine, words: Sequence[object], env: Mapping[str, str], output: IO[Any]) -> Command:
    """Start `footplate WORDS…` on a machine."""
    assert machine.pid is not None
    user = ["user"] if namespaces.needs_user_namespace() else []
    # The fork forks its own template only on the machine.
    config = {"pid": machine.pid, "kinds": [*user, *OWN_NAMESPACES, "time"], "words": [str(word) for word in words]}
    return Command(
        template.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(config)], launches=False, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, env=command_environment(env), start_new_session=True,
        )
    )  # fmt: skip


def enter_and_run() -> None:
    """Run the command on the machine, and end as it ends."""
    config = json.loads(sys.argv[1])
    _enter(config["pid"], config["kinds"])
    pid = os.fork()
    if pid == 0:
        os.chdir(HOME)
        template.install_in_fork()
        sys.argv[:] = ["footplate", *config["words"]]
        runpy.run_module("footplate", run_name="__main__", alter_sys=True)
        sys.exit()

    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _enter(pid: int, kinds: Sequence[str]) -> None:
    """Enter namespaces of a process. Children of this process are in its PID namespace then."""
    files = [os.open(Path(f"/proc/{pid}/ns", _KERNEL_NAMES.get(kind, kind)), os.O_RDONLY) for kind in kinds]
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, file in zip(kinds, files, strict=True):
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"can't enter the {kind} namespace of process {pid}")
        os.close(file)
