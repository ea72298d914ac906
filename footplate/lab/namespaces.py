"""Enter and make the namespaces of the lab: the words to put before a command.

`unshare` and `nsenter` of util-linux do the work, and `ip` of iproute2. root may do that; another user needs a user
namespace of their own, in which they are root.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from footplate.core.errors import LaunchError

PROGRAMS = ("unshare", "nsenter", "ip")
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
CHILD_S = 10.0


def make(*kinds: str, clock_s: float | None = None) -> list[str]:
    """The words that run a command as the first process of new namespaces, such as `net` and `pid`.

    Args:
        kinds: of the namespaces.
        clock_s: how far its monotonic clock is ahead of ours, in seconds; None for the same clock.
    """
    words = [program("unshare"), *(f"--{kind}" for kind in kinds), "--fork", "--kill-child"]
    if clock_s is not None:
        words += ["--time", f"--monotonic={clock_s:.0f}", f"--boottime={clock_s:.0f}"]
    return words


def enter(pid: int, *kinds: str, directory: str | None = None) -> list[str]:
    """The words that run a command in the namespaces of a process.

    Args:
        pid: the process.
        kinds: of its namespaces.
        directory: the working directory, as the process sees it.
    """
    user = ["--user", "--preserve-credentials"] if needs_user_namespace() else []
    place = [f"--wdns={directory}"] if directory else []
    return [program("nsenter"), f"--target={pid}", *user, *(f"--{kind}" for kind in kinds), *place, "--"]


def needs_user_namespace() -> bool:
    """Return True if this user isn't root."""
    return os.geteuid() != 0


def program(name: str) -> str:
    """The path of a program that the lab needs.

    Raises:
        LaunchError: it isn't installed.
    """
    path = shutil.which(name, path=PATH)
    if path is None:
        raise LaunchError(
            f"The lab needs the program `{name}`: install {'iproute2' if name == 'ip' else 'util-linux'}."
        )
    return path


# What a machine and the switch do, in namespaces that nobody else has.
_TRIAL = """
import socket, subprocess
for words in (
    "mount --make-rprivate /", "mount -t proc proc /proc", "mount -t tmpfs tmpfs /dev/shm",
    "mount --bind /dev/null /proc/sys/kernel/random/boot_id", "ip link add lab0 type veth peer name lab1",
    "ip link set lab0 up", "hostname lab",
):
    done = subprocess.run(words.split(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{words}: {done.stderr.strip()}")
socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)).bind(("lab0", 0))
"""


@functools.cache
def why_not() -> str:
    """The reason why this user can't make a lab here, as a sentence; empty if they can.

    Examples:
        >>> from footplate.lab import Lab, why_not
        >>> if not why_not():
        ...     Lab(1).close()
    """
    try:
        for name in PROGRAMS:
            program(name)
        user = ["user", "map-root-user"] if needs_user_namespace() else []
        words = make(*user, "net", "uts", "ipc", "mount", "pid", clock_s=1000.0)
    except LaunchError as error:
        return str(error)
    done = subprocess.run(
        [*words, sys.executable, "-c", _TRIAL], capture_output=True, text=True, env={**os.environ, "PATH": PATH}
    )
    if done.returncode == 0:
        return ""
    reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return (
        f"A lab needs the right to make network, mount and PID namespaces, as root or in a user namespace: {reason[0]}."
    )


def only_child(process: subprocess.Popen[bytes], generations: int = 1) -> int:
    """The child of a process, or its child's child: `unshare` and `nsenter` start the command in a new process.

    Raises:
        LaunchError: there is none.
    """
    pid = process.pid
    for _ in range(generations):
        until = time.monotonic() + CHILD_S
        while not (pids := children(pid)):
            if process.poll() is not None or time.monotonic() > until:
                raise LaunchError(f"A process of the lab has ended with exit code {process.poll()}.")
            time.sleep(0.002)
        pid = pids[0]
    return pid


def wait_for_command(entered: subprocess.Popen[Any]) -> None:
    """Wait until `nsenter` has become the command, in its child, or has ended."""
    words = _command_line(entered.pid)
    while entered.poll() is None:
        if any(line and line != words for line in map(_command_line, children(entered.pid))):
            return
        time.sleep(0.002)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children(pid: int) -> Sequence[int]:
    """The processes that a process has started, the oldest first."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
