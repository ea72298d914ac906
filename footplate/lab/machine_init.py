"""The first process of a lab's machine: sets up its file system and its interface, and collects its orphans.

It gets its orders as one line of JSON on standard input when the interface is there, and says "ready".
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

SIOCETHTOOL = 0x8946
ETHTOOL_SRXCSUM, ETHTOOL_STXCSUM = 0x15, 0x17
# The directories that each machine has for itself.
PRIVATE = ("home", "tmp", "mnt")
MTU_BYTES = 65_000


def main() -> None:
    """Set up the machine, then wait for the end of its processes until it is killed."""
    # The orders come when the interface is there.
    orders = json.loads(sys.stdin.readline())
    _mount(orders)
    socket.sethostname(orders["hostname"])
    _connect(orders)
    os.write(1, b"ready\n")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.sigtimedwait({signal.SIGCHLD}, 1.0)


def _mount(orders: dict[str, Any]) -> None:
    own = Path(orders["directory"])
    _call("mount", "--make-rprivate", "/")
    _call("mount", "-t", "proc", "proc", "/proc")
    # What lies below a directory that is covered now, and is needed, gets its place in the one that covers it.
    for path in map(Path, orders["needed"]):
        if len(path.parts) > 2 and path.parts[1] in PRIVATE:
            place = own / path.relative_to("/")
            place.mkdir(parents=True, exist_ok=True)
            _call("mount", "--rbind", path, place)
    _call("mount", "--rbind", orders["shared"], own / "mnt")
    for file in ("hosts", "hostname", "resolv.conf"):
        with contextlib.suppress(FileNotFoundError):
            _call("mount", "--bind", own / "etc" / file, Path("/etc", file).resolve(strict=True))
    _call("mount", "--bind", own / "boot_id", "/proc/sys/kernel/random/boot_id")
    _call("mount", "-t", "tmpfs", "-o", "size=4g", "tmpfs", "/dev/shm")
    # The one that has the lab's own files is covered last.
    for name in sorted(PRIVATE, key=lambda name: name == own.parts[1]):
        _call("mount", "--rbind", own / name, f"/{name}")


def _connect(orders: dict[str, Any]) -> None:
    _call("ip", "link", "set", "lo", "up")
    if orders["stranger"]:
        # An interface that comes first, and leads nowhere.
        _call("ip", "link", "add", "ens1", "type", "veth", "peer", "name", "nowhere")
        for name in ("ens1", "nowhere"):
            _call("ip", "link", "set", name, "up")
        _call("ip", "address", "add", orders["stranger"], "dev", "ens1")
    for number, address in enumerate(orders["addresses"]):
        name = f"eth{number}"
        _leave_no_checksum_to_the_card(name)
        _call("ip", "link", "set", name, "mtu", str(MTU_BYTES))
        _call("ip", "address", "add", address, "dev", name)
        _call("ip", "link", "set", name, "up")


def _leave_no_checksum_to_the_card(interface: str) -> None:
    """The switch carries frames as they are, so they must have their checksums."""
    with socket.socket() as any_socket:
        for command in (ETHTOOL_STXCSUM, ETHTOOL_SRXCSUM):
            value = array.array("B", struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def _call(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
