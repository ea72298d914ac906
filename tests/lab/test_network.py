"""What happens to frames: the pure part of the lab."""

from __future__ import annotations

import random
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.errors import ConfigError
from footplate.lab.network import Link, Network, port_to_open

MACS = {name: bytes((2, 0, 0, 0, 0, index)) for index, name in enumerate(("m0", "m1", "m2"))}
BROADCAST = b"\xff" * 6


def network(seed: int = 0) -> Network:
    made = Network(random.Random(seed))
    for name, mac in MACS.items():
        made.add(name, mac)
    return made


def frame(source: str, destination: str | bytes, payload: bytes = b"", kind: int = 0x0800) -> bytes:
    to = destination if isinstance(destination, bytes) else MACS[destination]
    return to + MACS[source] + struct.pack("!H", kind) + payload


def tcp(port: int, flags: int) -> bytes:
    """A TCP segment in an IPv4 packet, without options."""
    segment = struct.pack("!HHIIBBHHH", 40000, port, 0, 0, 5 << 4, flags, 0, 0, 0)
    return struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(segment), 0, 0, 64, 6, 0, b"\0" * 4, b"\0" * 4) + segment


def tcp_over_ipv6(port: int, flags: int) -> bytes:
    segment = struct.pack("!HHIIBBHHH", 40000, port, 0, 0, 5 << 4, flags, 0, 0, 0)
    addresses = socket.inet_pton(socket.AF_INET6, "fe80::1") * 2
    return struct.pack("!IHBB", 6 << 28, len(segment), 6, 64) + addresses + segment


def arrives(made: Network, sent: bytes, source: str, now: float = 0.0) -> dict[str, float]:
    return {machine: due for due, machine in made.deliveries(sent, source, now)}


def test_a_frame_goes_to_the_machine_that_has_its_hardware_address():
    assert arrives(network(), frame("m0", "m2"), "m0", now=5.0) == {"m2": 5.0}


def test_a_broadcast_goes_to_all_others():
    assert set(arrives(network(), frame("m0", BROADCAST), "m0")) == {"m1", "m2"}


def test_a_frame_to_an_unknown_machine_goes_nowhere():
    assert not arrives(network(), frame("m0", b"\x02\0\0\0\1\1"), "m0")


def test_a_link_is_cut_in_one_direction():
    made = network()
    made.change_link("m0", "m1", connected=False)
    assert not arrives(made, frame("m0", "m1"), "m0")
    assert arrives(made, frame("m1", "m0"), "m1")
    assert set(arrives(made, frame("m0", BROADCAST), "m0")) == {"m2"}


def test_a_change_leaves_the_other_fields():
    made = network()
    made.change_link("m0", "m1", delay_s=0.5)
    made.change_link("m0", "m1", connected=False)
    made.change_link("m0", "m1", connected=True)
    assert arrives(made, frame("m0", "m1"), "m0") == {"m1": 0.5}


def test_the_share_of_frames_that_are_lost():
    made = network()
    made.change_link("m0", "m1", loss=0.25)
    arrived = sum(bool(arrives(made, frame("m0", "m1"), "m0")) for _ in range(4000))
    assert 0.72 < arrived / 4000 < 0.78


def test_a_rate_spaces_frames_and_a_full_queue_loses_them():
    made = network()
    made.change_link("m0", "m1", bytes_per_s=1000)
    sent = frame("m0", "m1", bytes(986))
    dues = [arrives(made, sent, "m0").get("m1") for _ in range(5)]
    assert dues == [1.0, 2.0, 3.0, None, None]
    assert arrives(made, sent, "m0", now=10.0) == {"m1": 11.0}


@given(
    times=st.lists(st.floats(0, 10), min_size=1, max_size=30).map(sorted),
    delay_s=st.floats(0, 1),
    jitter_s=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_frames_keep_their_order_and_arrive_after_they_were_sent(times, delay_s, jitter_s, seed):
    made = network(seed)
    made.change_link("m0", "m1", delay_s=delay_s, jitter_s=jitter_s)
    dues = [arrives(made, frame("m0", "m1"), "m0", now)["m1"] for now in times]
    assert dues == sorted(dues)
    assert all(due >= now for due, now in zip(dues, times, strict=True))


@pytest.mark.parametrize(("kind", "packet"), [(0x0800, tcp), (0x86DD, tcp_over_ipv6)])
def test_a_firewall_drops_new_connections_to_closed_ports_and_nothing_else(kind, packet):
    made = network()
    made.set_firewall("m1", [29500])
    opens, answers, carries = 0x02, 0x12, 0x10
    assert arrives(made, frame("m0", "m1", packet(29500, opens), kind), "m0")
    assert not arrives(made, frame("m0", "m1", packet(29501, opens), kind), "m0")
    assert arrives(made, frame("m0", "m1", packet(29501, answers), kind), "m0")
    assert arrives(made, frame("m0", "m1", packet(29501, carries), kind), "m0")
    assert arrives(made, frame("m1", "m0", packet(29501, opens), kind), "m1")
    made.set_firewall("m1", None)
    assert arrives(made, frame("m0", "m1", packet(29501, opens), kind), "m0")


@given(
    packet=st.sampled_from([(0x0800, 34, tcp), (0x86DD, 54, tcp_over_ipv6)]),
    port=st.integers(0, 65535),
    flags=st.integers(0, 255),
    length=st.integers(14, 80),
)
def test_a_frame_opens_a_port_if_its_segment_is_not_cut_off(packet, port, flags, length):
    kind, header, make = packet
    sent = frame("m0", "m1", make(port, flags), kind)[:length]
    opens = len(sent) >= header + 14 and flags & 0x12 == 0x02
    assert port_to_open(sent) == (port if opens else None)


@given(kind=st.sampled_from([0x0800, 0x86DD, 0x0806]), payload=st.binary(max_size=80))
def test_any_payload_opens_no_port_or_one_that_it_has(kind, payload):
    port = port_to_open(frame("m0", "m1", payload, kind))
    assert port is None or struct.pack("!H", port) in payload


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"delay_s": -1}, "delay_s=-1"),
        ({"jitter_s": float("nan")}, "jitter_s=nan"),
        ({"loss": 1.5}, "loss=1.5"),
        ({"bytes_per_s": 0}, "bytes_per_s=0"),
    ],
)
def test_a_link_that_cannot_be_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        Link(**fields)
