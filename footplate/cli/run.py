"""`footplate run [options] SCRIPT|-m MODULE [-- ARGS]`: a script in several processes, which are restarted when they fail.

Each process runs the script as its main program and finds its place in the environment, as under torchrun, so scripts
that were written for that run unchanged: plain DDP, Lightning, Accelerate, Footplate.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from footplate.errors import ConfigError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

log = logging.getLogger(__name__)


def parser(name: str) -> ArgumentParser:
    """The parser of `run`."""
    from footplate.cli.parsing import make_parser

    made = make_parser(
        name,
        "Run a script in several processes. What follows the script, or its --, is the script's. "
        "Exits with the script's exit code.",
    )
    made.add_argument("script", type=str, nargs="?", help="the script; or -m and the name of a module")
    made.add_argument("-m", "--module", type=str, default=None, help="run a module as a script")
    made.add_argument(
        "--np", type=int, default=1, help="how many processes; 0: one for each device, or slot of the cluster"
    )
    made.add_argument(
        "--backend", type=Literal["local", "ray", "spark"], default="local", help="where: this machine, or a cluster"
    )
    made.add_argument("--max-restarts", type=int, default=3, help="failures after which all are started again")
    made.add_argument("--log-dir", type=str | None, default=None, help="where the whole output of each process is kept")
    made.add_argument(
        "--show",
        type=Literal["all", "rank_0"],
        default="all",
        help="whose output is shown: each line with its rank, or rank 0's",
    )
    made.add_argument(
        "--heartbeat-timeout",
        type=float,
        default=30.0,
        help="seconds of silence after which a process counts as frozen",
    )
    return made


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our arguments, up to the script's or the module's name, and the rest, which is the script's.

    >>> split(["--np", "2", "train.py", "--", "--lr", "1"])
    (['--np', '2', 'train.py'], ['--lr', '1'])
    >>> split(["-m", "trainer.task", "--lr", "1"])
    (['-m', 'trainer.task'], ['--lr', '1'])
    """
    end = 0
    while end < len(argv):
        word = argv[end]
        if not word.startswith("-"):
            end += 1
            break
        flag = word in ("-h", "--help")
        end += 1 if flag or "=" in word else 2
        if word == "-m" or word.partition("=")[0] == "--module":
            break
    rest = list(argv[end:])
    return list(argv[:end]), rest[1:] if rest[:1] == ["--"] else rest


def run(name: str, argv: Sequence[str]) -> int:
    """Run a script; returns its exit code: of the rank that failed first, if one did.

    Raises:
        FootplateError: a mistake in the arguments, no such script, no such cluster.
        SystemExit: 143, after SIGTERM.
        KeyboardInterrupt: after Ctrl-C.
    """
    from footplate.cli.parsing import parse
    from footplate.launch.policy import Restarts
    from footplate.launch.runner import check, choose, new_log_dir, refuse_inside
    from footplate.launch.script import Script
    from footplate.launch.supervisor import failure_of, launch

    ours, args = split(argv)
    given = parse(parser(name), ours)
    target = given.module or given.script
    if target is None:
        raise ConfigError("expected a script, or -m and the name of a module: footplate run --np 2 train.py")
    script = Script(target, tuple(args), module=given.module is not None)
    script.check()
    check(given.np, given.backend, None, given.max_restarts, given.heartbeat_timeout)
    refuse_inside(f"footplate run {target}")
    backend, world_size = choose(given.np, given.backend)
    log_dir = new_log_dir(given.log_dir, script.name)
    try:
        launch(
            script,
            world_size=world_size,
            backend=backend,
            restarts=Restarts(max_restarts=given.max_restarts),
            name=script.name,
            log_dir=log_dir,
            show=given.show,
            heartbeat_timeout_s=given.heartbeat_timeout,
        )
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise
        print(_last_words(error), file=sys.stderr)
        print(f"Whole logs of all attempts: {log_dir}", file=sys.stderr)
        return failure.code
    return 0


def _last_words(error: BaseException) -> str:
    return str(getattr(error, "__notes__", [error])[-1])
