"""The network interface on which the ranks of several machines connect to each other.

By default, gloo listens at the address of this host's name. On Debian that is 127.0.1.1, which other machines can't reach,
and some hosts' names have no address. The way to `MASTER_ADDR` is a better guide, because all ranks reach that address.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from footplate.core.errors import ConfigError
from footplate.distributed.world import World

VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"
# The user's choice of an interface: `footplate run --interface`.
CHOICE = "FOOTPLATE_INTERFACE"


def chosen(environ: Mapping[str, str]) -> str | None:
    """The interface that the user has chosen with `FOOTPLATE_INTERFACE`; None without a choice.

    Raises:
        ConfigError: this machine has no such interface, or it has no address.
    """
    name = environ.get(CHOICE)
    if not name:
        return None
    if address_of(name) is None:
        addresses = {other: address_of(other) for other in _addresses()}
        usable = ", ".join(other for other, at in addresses.items() if at and not ipaddress.ip_address(at).is_loopback)
        raise ConfigError(
            f"{CHOICE}={name}: {socket.gethostname()} has no interface of this name with an address. It has {usable}."
        )
    return name


def for_gloo(world: World, environ: Mapping[str, str]) -> str | None:
    """Choose the interface's name; None to leave the choice to gloo.

    It is the value of `GLOO_SOCKET_IFNAME`, or of `FOOTPLATE_INTERFACE`; else the interface on the way to `MASTER_ADDR`.
    `MASTER_ADDR` may be a name that means a loopback address on this machine. If other machines take part, the interface is
    then the only one that isn't the loopback.

    Raises:
        ConfigError: this machine doesn't have the interface that `FOOTPLATE_INTERFACE` names.
    """
    if environ.get(VARIABLE):
        return environ[VARIABLE].split(",")[0]
    if choice := chosen(environ):
        return choice
    master = environ.get("MASTER_ADDR")
    own = _address_towards(master) if master else None
    if own is None:
        return None
    if ipaddress.ip_address(own).is_loopback and world.size > world.local_size:
        return _only_outward()
    return with_address(own)


def address_of(interface: str) -> str | None:
    """The first address of an interface, at which gloo listens; None if it has none that other machines reach."""
    addresses = _addresses().get(interface, ())
    return next((address for address in addresses if not ipaddress.ip_address(address).is_link_local), None)


def _address_towards(host: str) -> str | None:
    """The address of this machine from which packets to a host go. Sends nothing."""
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as unused:
            unused.connect(address)
            return str(unused.getsockname()[0]).partition("%")[0]
    except OSError:
        return None


def with_address(address: str) -> str | None:
    """The interface that has an address; None if there is none."""
    if address == LOOPBACK:
        # Every launch on one machine asks for it: psutil isn't imported for that.
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return next((name for name, addresses in _addresses().items() if address in addresses), None)


def _only_outward() -> str | None:
    """The interface with an IPv4 address that isn't a loopback; None if there are several, or none."""
    names = [
        name
        for name, addresses in _addresses().items()
        if any("." in address and not ipaddress.ip_address(address).is_loopback for address in addresses)
    ]
    return names[0] if len(names) == 1 else None


def _addresses() -> dict[str, list[str]]:
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }
