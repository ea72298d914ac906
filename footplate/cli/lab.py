"""`footplate lab up|exec|cut|…`: several machines on this one, to try what happens when a network breaks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from footplate.cli.arguments import Parser, make_parser
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace

    from footplate.lab import Lab, Machine

# The actions that take a machine and nothing else.
ABOUT = {
    "cut": "cut it off from all others; neither side is notified",
    "kill": "kill all its processes at once; its kernel still closes their connections",
    "crash": "take its power away; no other machine is notified",
    "ps": "list its processes",
}


def parser(name: str) -> Parser:
    """Make the parser of `lab`, without its actions."""
    return make_parser(
        name,
        "Several machines on this one, each with its own network, host name, processes, /home, /tmp and clock. Their names "
        "are m0, m1, …, their addresses 10.77.0.10, 10.77.0.11, …, and /mnt is their shared disk. Break the network, and "
        "see what a training does. Linux only; as root, or in a user namespace.",
    )


def add_actions(parser: Parser) -> None:
    """Add `up`, `down`, `exec`, `boot` and the faults to the parser."""
    up = _action("up", "Start the machines. They run until `footplate lab down`.")
    up.add_argument("count", type=int, nargs="?", default=2, help="how many")

    execute = _action("exec", "Run a command on a machine. The exit code is that of the command.")
    execute.add_argument("machine", help="its name: m0")
    execute.add_argument("words", nargs="+", metavar="command", help="the command and its arguments, after --")

    boot = _action("boot", "Start a machine that was killed. It has its files from before.")
    boot.add_argument("machine", help="its name: m0")
    boot.add_argument("--address", help="a new address, in 10.77.0.0/24; by default the same as before")
    boot.add_argument("--hostname", help="a new host name; by default the same as before")

    partition = _action(
        "partition", "Drop everything from one machine to another. The opposite direction stays as it is."
    )
    partition.add_argument("source", help="the machine that sends: m0")
    partition.add_argument("destination", help="the machine that receives nothing: m1")

    shape = _action(
        "shape", "Slow a machine's connections, in both directions. Without options, restore their full speed."
    )
    shape.add_argument("machine", help="its name: m0")
    shape.add_argument("--delay", type=float, default=0.0, help="the delay of each frame, in seconds")
    shape.add_argument(
        "--jitter", type=float, default=0.0, help="the largest random deviation from the delay, in seconds"
    )
    shape.add_argument("--loss", type=float, default=0.0, help="the share of frames that are lost, 0 to 1")
    shape.add_argument("--bytes-per-s", type=float, help="the rate, in bytes per second")

    firewall = _action("firewall", "Let connections in at these TCP ports only. Open connections stay open.")
    firewall.add_argument("machine", help="its name: m0")
    firewall.add_argument("--open", type=int, nargs="*", default=[], metavar="PORT", help="the open ports")
    firewall.add_argument("--off", action="store_true", help="open all ports")

    actions = parser.add_subcommands(dest="action")
    for action, inner, about in (
        ("up", up, "start the machines"),
        ("exec", execute, "run a command on a machine"),
        ("boot", boot, "start a machine that was killed"),
        ("partition", partition, "drop everything from one machine to another"),
        ("shape", shape, "slow a machine's connections"),
        ("firewall", firewall, "close a machine's ports"),
        ("heal", _action("heal", "Connect all machines again, at full speed."), "connect all machines again"),
        ("down", _action("down", "Kill everything in the lab. The files stay."), "kill everything in the lab"),
    ):
        actions.add_subcommand(action, inner, help=about)
    for action, about in ABOUT.items():
        inner = _action(action, about[0].upper() + about[1:] + ".")
        inner.add_argument("machine", help="its name: m0")
        actions.add_subcommand(action, inner, help=about)


def run(name: str, argv: Sequence[str]) -> int:
    """Do the action; returns the exit code.

    Raises:
        FootplateError: a mistake in the arguments; no lab runs; this system can't make one.
    """
    from pathlib import Path

    from footplate.lab import Lab

    made = parser(name)
    add_actions(made)
    args = made.parse_args(argv)
    directory = Path(args.dir).expanduser()
    if args.action == "up":
        lab = Lab(args.count, directory, keep=True)
        for machine in lab.machines:
            print(f"{machine.name}  {machine.address}  {machine.home}")
        print(f"shared disk: /mnt in all of them, {lab.shared} here")
        return 0
    return _act(Lab.running(directory), args)


def _act(lab: Lab, args: Namespace) -> int:
    action = args.action
    if action == "down":
        lab.close()
    elif action == "heal":
        lab.heal()
    elif action == "partition":
        lab.partition([_machine(lab, args.source)], [_machine(lab, args.destination)])
    else:
        return _act_on(lab, _machine(lab, args.machine), args)
    return 0


def _act_on(lab: Lab, machine: Machine, args: Namespace) -> int:
    action = args.action
    if action == "exec":
        code = machine.start(args.words, output=None).wait()
        return code if code >= 0 else 128 - code
    if action == "boot":
        machine.boot(args.address, hostname=args.hostname)
    elif action == "shape":
        lab.shape(machine, args.delay, args.jitter, args.loss, args.bytes_per_s)
    elif action == "firewall":
        lab.firewall(machine, None if args.off else args.open)
    elif action == "cut":
        lab.cut(machine)
    elif action == "kill":
        machine.kill()
    elif action == "crash":
        machine.crash()
    elif action == "ps":
        sys.stdout.writelines(f"{line}\n" for line in machine.processes())
    return 0


def _action(action: str, about: str) -> Parser:
    made = make_parser(f"lab {action}", about)
    made.add_argument("--dir", default="~/.footplate/lab", help="the directory of the lab")
    return made


def _machine(lab: Lab, name: str) -> Machine:
    for machine in lab.machines:
        if machine.name == name:
            return machine
    raise ConfigError(f"machine {name}: the lab has m0 to m{len(lab.machines) - 1}.")
