"""`footplate stacks PID | DIR`: show where a training on this machine is now, and which ranks wait for which."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path

from footplate.cli.arguments import Parser, make_parser
from footplate.core.errors import ConfigError
from footplate.core.stacks import proc
from footplate.core.stacks.asking import ask, root_of
from footplate.core.stacks.report import report_on

LIMIT_S = 5.0
LOCK = ".lock"


def parser(name: str) -> Parser:
    """Make the parser."""
    made = make_parser(
        name,
        "Show the stacks of a running training and of all its ranks on this machine. The first line says which rank is "
        "where, and which ranks wait for it. The training goes on.",
    )
    made.add_argument("training", help="the id of a process, or a run's directory (default_root_dir)")
    add_native(made)
    return made


def add_native(made: Parser) -> None:
    """Add the option for native stacks."""
    made.add_argument(
        "--native",
        action="store_true",
        help="read native calls, too, with py-spy, which pauses the processes for a moment",
    )


def run(name: str, argv: Sequence[str]) -> int:
    """Print the stacks.

    Raises:
        ConfigError: there is no such process, or it isn't this user's; no training uses the directory.
    """
    args = parser(name).parse_args(argv)
    print(report_on(ask([root_of(process_of(args.training, "stacks"))], LIMIT_S, args.native)), end="")
    return 0


def process_of(training: str, command: str) -> int:
    """The process of a training, which the user names by the process's id or by the run's directory.

    Raises:
        ConfigError: there is no such process on this machine.
    """
    pid = int(training) if training.isdigit() else _holder(Path(training), command)
    state = proc.state_of(pid)
    if state is None or state[0] == "ended":
        raise ConfigError(f"{training}: this machine has no process {pid} now.")
    return pid


def _holder(directory: Path, command: str) -> int:
    """The process that trains in a run's directory."""
    try:
        holder = json.loads((directory / LOCK).read_text() or "{}")
        pid, host = int(holder["pid"]), holder["host"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{directory}: no training uses this directory now. Give a run's directory (default_root_dir) or a process id."
        ) from None
    if host != socket.gethostname():
        raise ConfigError(f"{directory}: process {pid} on {host} trains in it. Ask there: footplate {command} {pid}")
    return pid
