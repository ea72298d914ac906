"""What the lab's network does with a frame: where it goes, when, and whether it arrives.

Pure: time and chance come from outside. `switch.py` reads frames from the machines and obeys.

A `Link` is one direction between two machines. So a partition one way is a link that isn't connected, while the link back
is. A machine's firewall drops what would open a TCP connection to one of its closed ports, without an answer.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from footplate.core.errors import ConfigError

# The switch's socket, in the lab's directory.
SOCKET = "switch"
# Each machine has an interface to the first network, and may have one to the second.
NETWORKS = 2

BROADCAST_BIT = 1
IPV4, IPV6, TCP = 0x0800, 0x86DD, 6
SYN, ACK = 0x02, 0x10
# Longest time that a frame waits for a link's rate. Later frames are lost, as in a full queue.
QUEUE_S = 2.0


@dataclass(frozen=True)
class Link:
    """The traffic from one machine to another.

    Attributes:
        connected: False to drop everything. Neither side is notified.
        delay_s: how much later each frame arrives, in seconds.
        jitter_s: the most by which the delay varies, up and down. Frames keep their order.
        loss: the share of frames that are lost, 0 to 1.
        bytes_per_s: the rate; None for no limit.

    Examples:
        >>> from footplate.lab import Link
        >>> slow = Link(delay_s=0.02, loss=0.01)  # what `Lab.shape` makes
    """

    connected: bool = True
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("delay_s", "jitter_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)}: expected seconds, 0 or more.")
        if not 0 <= self.loss <= 1:
            raise ConfigError(f"loss={self.loss}: expected a share of the frames, 0 to 1.")
        if self.bytes_per_s is not None and not self.bytes_per_s > 0:
            raise ConfigError(f"bytes_per_s={self.bytes_per_s}: expected more than 0, or None for no limit.")


class Network:
    """The links and firewalls between machines.

    Args:
        chance: draws losses and jitter.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._machines: dict[bytes, str] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._open_ports: dict[str, frozenset[int]] = {}
        self._queued_until: dict[tuple[str, str], float] = {}
        self._due: dict[tuple[str, str], float] = {}

    def add(self, machine: str, mac: bytes) -> None:
        """Add a machine, by its hardware address."""
        self._machines[mac] = machine

    def change_link(self, source: str, destination: str, **fields: float | bool | None) -> None:
        """Change the traffic from one machine to another. `fields` are those of `Link`; the others stay as they are."""
        pair = (source, destination)
        self._links[pair] = replace(self._links.get(pair, Link()), **fields)  # pyright: ignore[reportArgumentType]

    def set_firewall(self, machine: str, open_ports: Collection[int] | None) -> None:
        """Open only these ports of a machine; None opens all."""
        if open_ports is None:
            self._open_ports.pop(machine, None)
        else:
            self._open_ports[machine] = frozenset(open_ports)

    def deliveries(self, frame: bytes, source: str, now: float) -> Iterator[tuple[float, str]]:
        """Yield when and to which machine a frame goes. Times are on the clock of `now`, in seconds."""
        for destination in self._destinations(frame, source):
            opened = self._open_ports.get(destination)
            if opened is not None and (port := port_to_open(frame)) is not None and port not in opened:
                continue
            due = self._due_time(len(frame), source, destination, now)
            if due is not None:
                yield due, destination

    def _destinations(self, frame: bytes, source: str) -> list[str]:
        mac = frame[:6]
        if mac[0] & BROADCAST_BIT:
            return [machine for machine in self._machines.values() if machine != source]
        return [self._machines[mac]] if mac in self._machines else []

    def _due_time(self, length: int, source: str, destination: str, now: float) -> float | None:
        pair = (source, destination)
        link = self._links.get(pair)
        if link is None:
            return now
        if not link.connected or self._chance.random() < link.loss:
            return None
        due = now
        if link.bytes_per_s is not None:
            begin = max(now, self._queued_until.get(pair, now))
            if begin - now > QUEUE_S:
                return None
            due = self._queued_until[pair] = begin + length / link.bytes_per_s
        due += max(0.0, link.delay_s + self._chance.uniform(-link.jitter_s, link.jitter_s))
        self._due[pair] = due = max(due, self._due.get(pair, due))
        return due


def interface_of(machine: str, network: int) -> str:
    """The name of the switch's interface to a machine, in one of its networks."""
    return f"to-{machine}-{network}"


def port_to_open(frame: bytes) -> int | None:
    """The TCP port at which a frame asks for a new connection; None if it is another frame."""
    kind = struct.unpack_from("!H", frame, 12)[0]
    if kind == IPV4 and len(frame) > 23:
        transport, start = frame[23], 14 + (frame[14] & 0x0F) * 4
    elif kind == IPV6 and len(frame) > 20:
        transport, start = frame[20], 54
    else:
        return None
    if transport != TCP or len(frame) < start + 14 or frame[start + 13] & (SYN | ACK) != SYN:
        return None
    return struct.unpack_from("!H", frame, start + 2)[0]
