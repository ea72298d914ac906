"""`footplate run [options] SCRIPT|-m MODULE [-- ARGS]`: a script in several processes, which are restarted when they fail.

Each process runs the script as its main program and finds its place in the environment, as under torchrun, so scripts
that were written for that run unchanged: plain DDP, Lightning, Accelerate, Footplate.

On several machines without a cluster's engine, the same command is given on each, with a number of its own:

    FOOTPLATE_TOKEN=… footplate run --nnodes 2 --node-rank 0 --master-addr ADDRESS --np 8 train.py
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from footplate.launch.backends import Backend
    from footplate.launch.policy import Restarts
    from footplate.launch.script import Script


def parser(name: str) -> ArgumentParser:
    """The parser of `run`."""
    from footplate.cli.parsing import add_backend, make_parser

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
    add_backend(made)
    made.add_argument(
        "--nnodes",
        type=int,
        default=1,
        help="machines that the np processes are on, on each of which this command is given",
    )
    made.add_argument("--node-rank", type=int, default=0, help="which of them this is; 0 looks after all processes")
    made.add_argument("--master-addr", type=str | None, default=None, help="the address of machine 0, for the others")
    made.add_argument("--master-port", type=int, default=29500, help="its port where they meet")
    made.add_argument("--max-restarts", type=int, default=3, help="failures after which all are started again")
    made.add_argument(
        "--max-host-restarts", type=int, default=10, help="likewise, losses of a machine, which don't count as those"
    )
    made.add_argument(
        "--log-dir",
        type=str | None,
        default=None,
        help="where the whole output of each process is kept; by default a temporary one, kept if it fails",
    )
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
    from footplate.launch.runner import check, choose, refuse_inside
    from footplate.launch.script import Script

    ours, args = split(argv)
    given = parse(parser(name), ours)
    target = given.module or given.script
    if target is None:
        raise ConfigError("expected a script, or -m and the name of a module: footplate run --np 2 train.py")
    script = Script(target, tuple(args), module=given.module is not None)
    script.check()
    restarts = Restarts(given.max_restarts, given.max_host_restarts)
    check(given.np, given.backend, None, restarts, given.heartbeat_timeout)
    refuse_inside(f"footplate run {target}")
    if given.nnodes != 1:
        return _on_machines(script, given, restarts)
    return _launch(script, given, restarts, *choose(given.np, given.backend))


def _on_machines(script: Script, given: Namespace, restarts: Restarts) -> int:
    """Be one of several machines."""
    from footplate.launch.backends import Cluster
    from footplate.launch.cluster.machines import MachinePlacement
    from footplate.launch.cluster.member import LostError, join
    from footplate.server.auth import take

    _check_machines(given)
    _, token = take(None)
    if given.master_addr is None or token is None:
        raise ConfigError(
            f"--nnodes {given.nnodes} needs --master-addr, an address of machine 0, and FOOTPLATE_TOKEN in the "
            "environment: the same secret on all machines, since whoever knows it may run code there."
        )
    if given.node_rank > 0:
        try:
            return join(given.master_addr, given.master_port, token, given.node_rank)
        except LostError as error:
            print(f"footplate run: {error}", file=sys.stderr)
            return 1
    placement = MachinePlacement(given.nnodes, given.np // given.nnodes, given.master_addr, given.master_port, token)
    here = threading.Thread(target=join, args=(given.master_addr, placement.port, token, 0), daemon=True)
    here.start()
    code = 1
    try:
        code = _launch(script, given, restarts, Cluster(placement), given.np)
    except KeyboardInterrupt:
        code = 130
        raise
    except SystemExit:
        code = 143
        raise
    finally:
        placement.dismiss(code)
        here.join()
    return code


def _check_machines(given: Namespace) -> None:
    nodes = given.nnodes
    if nodes < 1 or not 0 <= given.node_rank < nodes:
        raise ConfigError(f"--nnodes {nodes} --node-rank {given.node_rank}: expected ranks from 0 to nnodes - 1.")
    if given.np < nodes or given.np % nodes:
        raise ConfigError(
            f"--np {given.np} --nnodes {nodes}: expected as many processes on each machine, such as {nodes * 4}."
        )
    if given.backend != "local":
        raise ConfigError(
            f"--nnodes {nodes} --backend {given.backend}: a cluster's engine chooses the machines. Leave one out."
        )


def _launch(script: Script, given: Namespace, restarts: Restarts, backend: Backend, world_size: int) -> int:
    from footplate.launch.runner import new_log_dir
    from footplate.launch.supervisor import failure_of, launch

    log_dir = new_log_dir(given.log_dir, script.name)
    try:
        launch(
            script,
            world_size=world_size,
            backend=backend,
            restarts=restarts,
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
    if given.log_dir is None:
        shutil.rmtree(log_dir, ignore_errors=True)
    return 0


def _last_words(error: BaseException) -> str:
    return str(getattr(error, "__notes__", [error])[-1])
