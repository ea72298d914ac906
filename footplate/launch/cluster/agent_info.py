"""An agent's description of itself, which it sends to the driver in the handshake, and the comparison of versions.

The driver and an agent prove the token to each other first (`core/net/handshake.py`). The cluster's engine has carried
the token to the agent. A token belongs to one group of agents: an agent of an earlier group, still alive somewhere, is
refused. Neither side unpickles anything before the other has proved the token.

The agent tells its versions, because another version may not be able to load what this one has pickled. It tells its
clock, so that the driver can convert the times that the agent reports.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from footplate.core.version import __version__
from footplate.hardware.machine import system_text
from footplate.hardware.packages import installed_version
from footplate.launch import rendezvous

DEVICES = "CUDA_VISIBLE_DEVICES"
# The connection's purpose, which the handshake compares.
PURPOSE = "agent"


@dataclass(frozen=True)
class AgentInfo:
    """An agent's description of itself: the details of its handshake.

    Attributes:
        index: its index in the allocation.
        machine: the machine's name, for people.
        host_group: equal for agents whose workers may share processes: on one machine, in one container, of one node.
        versions: of the packages that must be the same everywhere.
        task: an address of this machine at which the worker of this index may have a server of its own.
        devices: the accelerators that this allocation has, as in CUDA_VISIBLE_DEVICES; None if that isn't set.
        clock: the monotonic clock, in seconds.
    """

    index: int
    machine: str
    host_group: str
    versions: dict[str, str]
    task: str
    devices: str | None
    clock: float

    def as_details(self) -> dict[str, Any]:
        """The details to send in the handshake."""
        return asdict(self)

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> AgentInfo | None:
        """The description in the details of a handshake; None if they are something else."""
        types = {
            "index": int,
            "machine": str,
            "host_group": str,
            "versions": dict,
            "task": str,
            "clock": float,
        }
        fits = all(isinstance(details.get(name), kind) for name, kind in types.items())
        if not fits or not isinstance(details.get("devices"), str | None):
            return None
        return cls(**{name: details[name] for name in cls.__dataclass_fields__})

    @classmethod
    def of_this_process(cls, index: int, node: str, address: str) -> AgentInfo:
        """Describe this process.

        Args:
            index: its index in the allocation.
            node: the engine's name for this node; may be empty.
            address: of this machine, for the other agents.
        """
        (task,) = rendezvous.free_addresses(address, 1)
        return cls(
            index, socket.gethostname(), host_group(node), versions(), task, os.environ.get(DEVICES), time.monotonic()
        )


def versions() -> dict[str, str]:
    """Versions of what pickles, and of what is pickled.

    Torch is without the build: "+cpu" and "+cu128" fit together.
    """
    installed = {"Python": ".".join(platform.python_version_tuple()[:2]), "footplate": __version__}
    for name in ("torch", "cloudpickle"):
        installed[name] = (installed_version(name) or "none").partition("+")[0]
    return installed


def version_differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Describe how versions differ; empty if they don't.

    >>> version_differences({"Python": "3.11", "torch": "2.12.0"}, {"Python": "3.11", "torch": "2.13.0"})
    'torch 2.12.0, here torch 2.13.0'
    """
    return "; ".join(
        f"{name} {theirs.get(name, 'none')}, here {name} {version}"
        for name, version in ours.items()
        if theirs.get(name, "none") != version
    )


def host_group(node: str) -> str:
    """A hash that is equal for processes of one machine, in one container and one group of limits."""
    marks = [node, socket.gethostname()]
    for file in ("/proc/sys/kernel/random/boot_id", "/proc/self/cgroup"):
        marks.append(system_text(Path(file)))
    for space in ("mnt", "pid", "net"):
        marks.append(_link_target(Path(f"/proc/self/ns/{space}")))
    return hashlib.sha256("|".join(marks).encode()).hexdigest()


def _link_target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""
