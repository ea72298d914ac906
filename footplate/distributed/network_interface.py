"""The network interface on which gloo meets the other ranks.

Left to itself, gloo listens at the address that this host's name leads to. On Debian that is 127.0.1.1, which other
machines can't reach, and some hosts' names lead nowhere. The way to `MASTER_ADDR` is a better guide, since all ranks reach
that address.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from footplate.distributed.world import World

VARIABLE = "GLOO_SOCKET_IFNAME"


def for_gloo(world: World, environ: Mapping[str, str]) -> str | None:
    """The interface's name; None to leave the choice to gloo.

    It is what `GLOO_SOCKET_IFNAME` says; else the interface on the way to `MASTER_ADDR`. Where `MASTER_ADDR` is a name that
    is a loopback address on this machine, and other machines take part, it is the only interface that isn't the loopback.
    """
    if environ.get(VARIABLE):
        return environ[VARIABLE].split(",")[0]
    master = environ.get("MASTER_ADDR")
    own = _address_towards(master) if master else None
    if own is None:
        return None
    if ipaddress.ip_address(own).is_loopback and world.size > world.local_size:
        return _only_outward()
    return _with_address(own)


def address_of(interface: str) -> str | None:
    """The address of an interface at which gloo listens, the first; None if it has none that other machines reach."""
    return next((one for one in _addresses().get(interface, ()) if not ipaddress.ip_address(one).is_link_local), None)


def _address_towards(host: str) -> str | None:
    """The address of this machine from which packets to a host go; nothing is sent."""
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(address)
            return str(way.getsockname()[0]).partition("%")[0]
    except OSError:
        return None


def _with_address(address: str) -> str | None:
    return next((name for name, addresses in _addresses().items() if address in addresses), None)


def _only_outward() -> str | None:
    """The interface with an IPv4 address that isn't a loopback; None if there are several, or none."""
    names = [
        name
        for name, addresses in _addresses().items()
        if any("." in one and not ipaddress.ip_address(one).is_loopback for one in addresses)
    ]
    return names[0] if len(names) == 1 else None


def _addresses() -> dict[str, list[str]]:
    import psutil

    inet = (socket.AF_INET, socket.AF_INET6)
    found = psutil.net_if_addrs().items()
    return {name: [one.address.partition("%")[0] for one in every if one.family in inet] for name, every in found}
