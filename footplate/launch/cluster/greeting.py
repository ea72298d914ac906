"""How the driver and an agent come to trust each other, and whether they fit.

    driver                                   agent
                          ◄───────────────   connects
    a nonce               ───────────────►
                          ◄───────────────   Hello: the nonce's proof, a nonce of its own, who and what it is
    the proof of that     ───────────────►

A proof is an HMAC of the nonce with the token that the cluster's engine has carried to the agent. Nothing is unpickled by
either side before the other has shown its own. The token is of one gang: an agent of an earlier one, still alive somewhere,
is refused. What follows is neither signed nor encrypted, like the traffic of torch.distributed itself.

The agent tells its versions, as what is pickled by one version may not be loaded by another; and its clock, by which the
times that it reports are put in relation to the driver's.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from footplate.core.version import __version__
from footplate.launch import rendezvous

DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Hello:
    """What an agent says of itself.

    Attributes:
        index: which place of the gang.
        nonce: what the driver must prove the token with.
        proof: of the token, with the driver's nonce.
        machine: the machine's name, for people.
        household: equal for those that may share processes: on one machine, in one container, of one node.
        versions: of what must be alike everywhere.
        task: an address of this machine at which the place's worker may have a server of its own.
        devices: the accelerators that this place was given, as CUDA_VISIBLE_DEVICES has them; None if it isn't set.
        clock: the monotonic clock, in seconds.
    """

    index: int
    nonce: str
    proof: str
    machine: str
    household: str
    versions: dict[str, str]
    task: str
    devices: str | None
    clock: float

    def as_message(self) -> dict[str, Any]:
        """To be sent."""
        return asdict(self)

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Hello | None:
        """The greeting in a message that somebody has sent, who may be anybody; None if it is none."""
        kinds = {
            "index": int,
            "nonce": str,
            "proof": str,
            "machine": str,
            "household": str,
            "versions": dict,
            "task": str,
            "clock": float,
        }
        fits = all(isinstance(message.get(name), kind) for name, kind in kinds.items())
        if not fits or not isinstance(message.get("devices"), str | None):
            return None
        return cls(**{name: message[name] for name in cls.__dataclass_fields__})


def nonce() -> str:
    """Something that was never there before."""
    return secrets.token_hex(16)


def proof(token: bytes, who: str, nonce: str) -> str:
    """That `who` ("driver", "agent") knows the token."""
    return hmac.new(token, f"{who}:{nonce}".encode(), "sha256").hexdigest()


def proves(token: bytes, who: str, nonce: str, said: str) -> bool:
    """Whether that is a proof."""
    return hmac.compare_digest(proof(token, who, nonce).encode(), said.encode(errors="replace"))


def greet(token: bytes, index: int, driver_nonce: str, node: str, address: str) -> Hello:
    """An agent's answer to the driver's nonce.

    `node`: what the engine calls the node that this is on, if anything. `address`: of this machine, for the other agents.
    """
    (task,) = rendezvous.free_addresses(address, 1)
    return Hello(
        index, nonce(), proof(token, "agent", driver_nonce), socket.gethostname(), household(node), versions(), task,
        os.environ.get(DEVICES), time.monotonic(),
    )  # fmt: skip


def versions() -> dict[str, str]:
    """Of what is pickled with, and of what is pickled. Of torch without the build: "+cpu" and "+cu128" fit together."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2]), "footplate": __version__}
    for name in ("torch", "cloudpickle"):
        try:
            found[name] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def skew(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """How they differ, in words; empty if they don't.

    >>> skew({"Python": "3.11", "torch": "2.12.0"}, {"Python": "3.11", "torch": "2.13.0"})
    'torch 2.12.0, here torch 2.13.0'
    """
    return "; ".join(
        f"{name} {theirs.get(name, 'none')}, here {name} {version}"
        for name, version in ours.items()
        if theirs.get(name, "none") != version
    )


def household(node: str) -> str:
    """What is equal for processes of one machine, in one container and one group of limits."""
    marks = [node, socket.gethostname()]
    for file in ("/proc/sys/kernel/random/boot_id", "/proc/self/cgroup"):
        marks.append(_text(Path(file)))
    for space in ("mnt", "pid", "net"):
        marks.append(_target(Path(f"/proc/self/ns/{space}")))
    return hashlib.sha256("|".join(marks).encode()).hexdigest()


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""
