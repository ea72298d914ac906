"""The network interface on which gloo connects the ranks."""

from __future__ import annotations

import socket
import sys

import psutil
import pytest

from footplate.core.errors import ConfigError
from footplate.distributed.network_interface import chosen, for_gloo
from footplate.distributed.world import World

HERE, APART = World(0, 2, 0, 2), World(0, 2, 0, 1)
LOOPBACK = next(
    name for name, every in psutil.net_if_addrs().items() if "127.0.0.1" in {address.address for address in every}
)
OUTWARD = {
    name: address.address
    for name, every in psutil.net_if_addrs().items()
    for address in every
    if address.family == socket.AF_INET and not address.address.startswith("127.")
}


def test_the_variable_is_obeyed_and_without_an_address_gloo_chooses():
    assert for_gloo(APART, {"GLOO_SOCKET_IFNAME": "eth7,eth8", "MASTER_ADDR": "127.0.0.1"}) == "eth7"
    assert for_gloo(APART, {}) is None
    assert for_gloo(APART, {"MASTER_ADDR": "no-such-host.invalid"}) is None


def test_it_is_the_one_on_the_way_to_rank_0():
    assert for_gloo(HERE, {"MASTER_ADDR": "127.0.0.1"}) == LOOPBACK
    if sys.platform == "linux":  # a packet to an address of its own doesn't leave through the interface elsewhere
        for name, address in OUTWARD.items():
            assert for_gloo(APART, {"MASTER_ADDR": address}) == name


@pytest.mark.parametrize("master", ["127.0.1.1", "localhost"])
def test_between_machines_it_is_never_the_loopback(master):
    """As on rank 0's machine, where MASTER_ADDR may be a name that leads to 127.0.1.1."""
    interface = for_gloo(APART, {"MASTER_ADDR": master})
    assert interface == (next(iter(OUTWARD)) if len(OUTWARD) == 1 else None)


def test_the_user_chooses_an_interface():
    assert chosen({}) is None
    assert chosen({"FOOTPLATE_INTERFACE": LOOPBACK}) == LOOPBACK
    assert for_gloo(APART, {"FOOTPLATE_INTERFACE": LOOPBACK, "MASTER_ADDR": "no-such-host.invalid"}) == LOOPBACK
    assert for_gloo(APART, {"FOOTPLATE_INTERFACE": LOOPBACK, "GLOO_SOCKET_IFNAME": "eth7"}) == "eth7"


def test_an_interface_that_this_machine_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"FOOTPLATE_INTERFACE=eth77: .* has no interface of this name"):
        for_gloo(HERE, {"FOOTPLATE_INTERFACE": "eth77"})
