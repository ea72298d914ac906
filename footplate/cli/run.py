"""`footplate run [options] SCRIPT|-m MODULE [-- ARGS]`: run a script in several processes, with restarts after a failure.

Each process runs the script as its main program, with its rank and the world size in environment variables, as under
torchrun. Scripts that were written for torchrun work unchanged: plain DDP, Lightning, Accelerate, Footplate.

To use several machines without a cluster engine, give the same command on each machine, with a node rank of its own:

    FOOTPLATE_TOKEN=… footplate run --nnodes 2 --node-rank 0 --master-addr ADDRESS --np 8 train.py

With `--nnodes 1:2`, one machine is enough: the script goes on without the other one, and with it when it is back.

In an allocation of Slurm these options follow from Slurm's variables (`launch/slurm_allocation.py`).
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.cli.arguments import Parser, add_backend, make_parser
from footplate.core.errors import ConfigError
from footplate.core.profile_requests import VARIABLE, StepRange

if TYPE_CHECKING:
    from argparse import Namespace

    from footplate.launch.backends import Backend
    from footplate.launch.policy import Restarts
    from footplate.launch.script import Script
    from footplate.launch.slurm_allocation import Allocation


@dataclass(frozen=True)
class NodeCounts:
    """The numbers of machines of `--nnodes`: the fewest that are enough, and all."""

    fewest: int
    most: int

    @property
    def elastic(self) -> bool:
        """Whether the number may change."""
        return self.fewest != self.most

    def __str__(self) -> str:
        return f"{self.fewest}:{self.most}" if self.elastic else str(self.most)


def node_counts(text: str) -> NodeCounts:
    """Read the value of `--nnodes`, such as 2:4, or 4 for 4:4.

    Raises:
        argparse.ArgumentTypeError: it isn't one.
    """
    fewest, colon, most = text.partition(":")
    try:
        counts = NodeCounts(int(fewest), int(most) if colon else int(fewest))
    except ValueError:
        counts = NodeCounts(0, 0)
    if not 1 <= counts.fewest <= counts.most:
        raise ArgumentTypeError(
            f"{text!r}: expected a number of machines, such as 4, or the fewest and all, such as 2:4"
        )
    return counts


def parser(name: str) -> Parser:
    """Make the parser of `run`."""
    parser = make_parser(
        name,
        "Run a script in several processes. The arguments after the script, or after --, are passed to the script. "
        "The exit code is that of the script.",
    )
    parser.add_argument("script", nargs="?", help="the script; or use -m with the name of a module")
    parser.add_argument("-m", "--module", help="run this module as a script")
    parser.add_argument(
        "--np",
        type=int,
        help="the number of processes on all machines together, by default 1, or those that Slurm has allocated; 0 starts "
        "one for each device, or for each slot of the cluster",
    )
    add_backend(parser)
    parser.add_argument(
        "--min-np",
        type=int,
        help="the smallest number of processes with which the run goes on, with --backend ray or spark: machines may be "
        "lost, and come back",
    )
    parser.add_argument(
        "--nnodes",
        type=node_counts,
        metavar="N|MIN:N",
        help="the number of machines, by default 1, or those of the Slurm step; give this command on each of them. With "
        "MIN:N, as few as MIN are enough: machines may leave, and join again",
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        help="the number of this machine, by default 0, or Slurm's; machine 0 supervises all processes",
    )
    parser.add_argument("--master-addr", help="the address of machine 0; by default the first node of the Slurm step")
    parser.add_argument(
        "--master-port",
        type=int,
        help="the port of machine 0 for the rendezvous, by default 29500, or on Slurm a free one",
    )
    parser.add_argument(
        "--interface",
        help="the network interface of this machine on which ranks connect to those of other machines, such as eth1; by "
        "default the one on the way to --master-addr",
    )
    parser.add_argument(
        "--tls",
        action="store_true",
        help="encrypt the connections of the launch to other machines, with a key of its own; give it on all machines. "
        "Gradients go over connections of torch.distributed, which stay as they are",
    )
    parser.add_argument(
        "--max-restarts", type=int, default=3, help="failures after which all processes are started again"
    )
    parser.add_argument(
        "--max-host-restarts",
        type=int,
        default=10,
        help="lost machines after which all processes are started again; --max-restarts doesn't count these",
    )
    parser.add_argument(
        "--log-dir",
        help="the directory for the output of each process; by default a temporary one, kept if the script fails",
    )
    parser.add_argument(
        "--show",
        choices=("all", "rank_0"),
        default="all",
        help="the output that is shown: every line, with its rank, or only that of rank 0",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        type=float,
        default=30.0,
        help="seconds without a heartbeat after which a process counts as frozen",
    )
    parser.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        help="profile these steps of each training of the script, such as 10:20 for ten steps; see docs/guide/profiling.md",
    )
    return parser


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into those of `footplate run`, up to the name of the script or module, and those of the script.

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
        flag = word in ("-h", "--help", "--tls")
        end += 1 if flag or "=" in word else 2
        if word == "-m" or word.partition("=")[0] == "--module":
            break
    rest = list(argv[end:])
    return list(argv[:end]), rest[1:] if rest[:1] == ["--"] else rest


def run(name: str, argv: Sequence[str]) -> int:
    """Run a script; returns its exit code. If a rank failed, that is the code of the first one that failed.

    Raises:
        FootplateError: a mistake in the arguments; the script or the cluster doesn't exist.
        SystemExit: 143, after SIGTERM.
        KeyboardInterrupt: after Ctrl-C.
    """
    from footplate.launch.policy import Restarts
    from footplate.launch.runner import check, choose, refuse_inside
    from footplate.launch.script import Script

    ours, script_args = split(argv)
    args = parser(name).parse_args(ours)
    target = args.module or args.script
    if target is None:
        raise ConfigError("expected a script, or -m and the name of a module: footplate run --np 2 train.py")
    script = Script(target, tuple(script_args), module=args.module is not None)
    script.check()

    meeting_file = _complete(args, f"footplate run {target}")
    if args.profile is not None:
        StepRange.parse(args.profile, "--profile")
    restarts = Restarts(args.max_restarts, args.max_host_restarts)
    check(args.np, args.backend, None, restarts, args.heartbeat_timeout, args.tls, args.min_np)
    refuse_inside(f"footplate run {target}")
    if args.interface is not None and args.nnodes.most == 1:
        raise ConfigError(f"--interface {args.interface} is for several machines: give --nnodes, too.")
    if args.min_np is not None and args.nnodes.most > 1:
        raise ConfigError(
            f"--min-np {args.min_np} is for a cluster engine: write --nnodes MIN:{args.nnodes.most} instead."
        )
    if args.nnodes.most != 1:
        try:
            return _on_machines(script, args, restarts)
        finally:
            if meeting_file is not None:
                meeting_file.unlink(missing_ok=True)
    return _launch(script, args, restarts, *choose(args.np, args.backend, tls=args.tls, min_np=args.min_np))


def _complete(args: Namespace, command: str) -> Path | None:
    """Set the options that weren't given: from Slurm's variables in an allocation, or else to their defaults.

    Returns:
        The file with the launch's meeting point, if this machine has written one.

    Raises:
        ConfigError: Slurm has started the command in a way that can't work.
    """
    from footplate.launch.slurm_allocation import allocation

    written = None
    # With --backend or --nnodes, the user has said which machines take part.
    if args.backend == "local" and args.nnodes is None:
        allocated = allocation(os.environ, command)
        written = None if allocated is None else _complete_from_slurm(args, allocated)
    _default(args, np=1, nnodes=NodeCounts(1, 1), node_rank=0, master_port=29500)
    return written


def _complete_from_slurm(args: Namespace, allocated: Allocation) -> Path | None:
    """Set the options that weren't given from Slurm's variables, and agree with the other machines on a port and a token.

    Returns:
        The file with the launch's meeting point, if this machine has written one.
    """
    from footplate.launch.slurm_allocation import Meeting, address_of, meeting_file
    from footplate.server.auth import VARIABLE as TOKEN

    args.nnodes = NodeCounts(allocated.nodes, allocated.nodes)
    _default(args, node_rank=allocated.node_rank, np=allocated.nodes * allocated.per_node)
    for name, value in allocated.job_variables.items():
        os.environ.setdefault(name, value)

    written = None
    if allocated.nodes > 1:
        args.master_addr = args.master_addr or address_of(allocated.first_node)
        if TOKEN not in os.environ:
            path = meeting_file(os.environ)
            if args.node_rank == 0:
                meeting, written = Meeting.new(args.master_addr), path
                meeting.write(path)
            else:
                meeting = Meeting.read(path)
            _default(args, master_port=meeting.port)
            os.environ[TOKEN] = meeting.token
    _default(args, master_port=allocated.port)
    return written


def _default(args: Namespace, **values: object) -> None:
    """Set the options that are still None."""
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _on_machines(script: Script, args: Namespace, restarts: Restarts) -> int:
    """Take part in a run on several machines. Machine 0 supervises it; the others wait for its commands."""
    from footplate.core.net.tls import ServerKey
    from footplate.distributed.network_interface import CHOICE, chosen
    from footplate.launch.backends import Cluster
    from footplate.launch.cluster.machines import MachinePlacement
    from footplate.launch.cluster.member import LostError, join
    from footplate.server.auth import take

    _check_machines(args)
    if args.interface is not None:
        os.environ[CHOICE] = args.interface
    chosen(os.environ)
    _, token = take(None)
    if args.master_addr is None or token is None:
        raise ConfigError(
            f"--nnodes {args.nnodes} needs --master-addr, an address of machine 0, and FOOTPLATE_TOKEN in the "
            "environment: the same secret on all machines. Keep it secret: it lets its owner run code on these machines."
        )
    if args.node_rank > 0:
        while True:
            try:
                return join(args.master_addr, args.master_port, token, args.node_rank, args.tls)
            except LostError as error:
                if not args.nnodes.elastic:
                    print(f"footplate run: {error}", file=sys.stderr)
                    return 1
            print("footplate run: lost the connection to machine 0; joining again", file=sys.stderr)
    nodes = args.nnodes.most
    key = ServerKey() if args.tls else None
    placement = MachinePlacement(
        nodes, args.np // nodes, args.master_addr, args.master_port, token, args.nnodes.fewest, key
    )

    # Machine 0 runs processes too, so it also joins its own run.
    member = threading.Thread(target=join, args=(args.master_addr, placement.port, token, 0, args.tls), daemon=True)
    member.start()

    # The other machines exit with this code.
    code = 1
    try:
        code = _launch(script, args, restarts, Cluster(placement, args.tls), args.np)
    except KeyboardInterrupt:
        code = 130
        raise
    except SystemExit:
        code = 143
        raise
    finally:
        placement.dismiss(code)
        member.join()
    return code


def _check_machines(args: Namespace) -> None:
    nodes = args.nnodes.most
    if nodes < 1 or not 0 <= args.node_rank < nodes:
        raise ConfigError(f"--nnodes {nodes} --node-rank {args.node_rank}: expected ranks from 0 to nnodes - 1.")
    if args.np < nodes or args.np % nodes:
        raise ConfigError(
            f"--np {args.np} --nnodes {nodes}: expected the same number of processes on each machine, such as --np "
            f"{nodes * 4}."
        )
    if args.backend != "local":
        raise ConfigError(
            f"--nnodes {nodes} --backend {args.backend}: the cluster engine chooses the machines. Leave one of them out."
        )


def _launch(script: Script, args: Namespace, restarts: Restarts, backend: Backend, world_size: int) -> int:
    from footplate.launch.runner import new_log_dir
    from footplate.launch.supervisor import failure_of, launch

    log_dir = new_log_dir(args.log_dir, script.name)
    try:
        launch(
            script,
            world_size=world_size,
            backend=backend,
            restarts=restarts,
            env=None if args.profile is None else {VARIABLE: args.profile},
            name=script.name,
            log_dir=log_dir,
            show=args.show,
            heartbeat_timeout_s=args.heartbeat_timeout,
        )
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise
        print(_last_words(error), file=sys.stderr)
        print(f"Whole logs of all attempts: {log_dir}", file=sys.stderr)
        return failure.code
    if args.log_dir is None:
        shutil.rmtree(log_dir, ignore_errors=True)
    return 0


def _last_words(error: BaseException) -> str:
    return str(getattr(error, "__notes__", [error])[-1])
