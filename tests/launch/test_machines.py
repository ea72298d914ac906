"""Machines without a cluster's engine: admission, refusal, and the ranks of each machine."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from wiretap import Wiretap

from footplate.core.errors import ConfigError, LaunchError
from footplate.core.net.framing import encode_frame
from footplate.core.net.handshake import PROTOCOL
from footplate.core.net.tls import ServerKey
from footplate.launch.cluster import machines, member
from footplate.launch.cluster.agent import AgentCall
from footplate.launch.cluster.machines import Connection, MachinePlacement

TOKEN = "the-token-of-these-tests"
CALL = AgentCall("127.0.0.1", 1, b"")


@pytest.fixture
def placement():
    """Make placements on this machine; they are closed at the end."""
    made = []

    def make(nodes=2, workers_per_node=1, min_nodes=None, key=None):
        made.append(MachinePlacement(nodes, workers_per_node, "127.0.0.1", 0, TOKEN, min_nodes, key))
        return made[-1]

    yield make
    for opened in made:
        opened.dismiss(0)


def stranger(placement: MachinePlacement, says: bytes = b"") -> socket.socket:
    connection = socket.create_connection((placement.host, placement.port))
    connection.settimeout(60)
    connection.sendall(says)
    return connection


def join(placement: MachinePlacement, node: int, token: str = TOKEN, tls: bool = False) -> Connection:
    return member._join(placement.host, placement.port, token, node, tls)


def read_to_the_end(connection: socket.socket) -> None:
    """Read until the other end closes the connection. It may do so before it has read all."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1000):
            pass


def wait_until(holds) -> None:
    """Wait until a thread of the placement has made a condition true; at most 20 s."""
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def orders(line: Connection) -> Iterator[dict]:
    """Yield the orders to a machine until its connection ends. Answer pings between them."""
    while (frame := line.receive()) is not None:
        if frame.message["do"] == "ping":
            line.send(pong=True)
        else:
            yield frame.message


def calls(line: Connection, count: int) -> list[int]:
    """The indices of the workers that a machine has to start."""
    return [order["index"] for order in islice(orders(line), count)]


def test_strangers_are_closed_and_their_number_is_limited(placement, monkeypatch):
    monkeypatch.setattr(machines, "HANDSHAKE_S", 1.0)
    opened = placement()
    before = threading.active_count()
    silent = [stranger(opened) for _ in range(3 * machines.MAX_STRANGERS)]
    joined = join(opened, 1)
    # The thread of a connection that has been closed needs a moment to end.
    wait_until(lambda: threading.active_count() <= before + machines.MAX_STRANGERS + 2)
    for connection in silent:
        read_to_the_end(connection)  # the challenge, and then the end
        connection.close()
    joined.close()


def test_a_stranger_who_speaks_slowly_has_no_more_time(placement, monkeypatch):
    monkeypatch.setattr(machines, "HANDSHAKE_S", 1.0)
    slow = stranger(placement())
    slow.settimeout(0.1)
    until = time.monotonic() + 60
    while True:
        assert time.monotonic() < until
        try:
            slow.sendall(b"[")
            if not slow.recv(100):
                return
        except TimeoutError:
            continue
        except ConnectionError:
            return


NO_ANSWERS = [
    encode_frame([1, 2]),
    encode_frame(1),
    encode_frame({"node": [1]}),
    encode_frame({"protocol": [1]}),
    encode_frame({"protocol": PROTOCOL, "nonce": {}, "proof": [], "details": []}),
    encode_frame({"protocol": PROTOCOL, "nonce": "", "proof": "\ud800", "details": {}}),
    b"nonsense\n",
    b"[" * 60_000 + b"\n",
    struct.pack("!II", 4000, 0) + b"[" * 4000,
]


@pytest.mark.parametrize("says", NO_ANSWERS)
def test_an_answer_that_is_none_disturbs_nobody(says, placement, monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    opened = placement()
    read_to_the_end(stranger(opened, says))
    join(opened, 0)
    assert raised == []


def test_refused_strangers_are_counted_and_do_not_fill_the_log(placement, monkeypatch, caplog):
    opened = placement(1)
    for _ in range(20):
        with stranger(opened, b"nonsense\n") as odd:
            read_to_the_end(odd)
    assert len(refusals(caplog)) == 1

    monkeypatch.setattr(opened._refusals, "_quiet_until", 0.0)
    until = time.monotonic() + 60
    while len(refusals(caplog)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert re.match(r"1\d connections were refused, the last one from 127.0.0.1: it doesn't know", refusals(caplog)[1])


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]


def test_a_placement_without_a_free_file_descriptor_accepts_again(placement, caplog):
    opened = placement(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = socket.socket()
    with Path("/dev/null").open() as file:
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno(), hard))
        try:
            waiting.connect((opened.host, opened.port))
            time.sleep(3 * machines.LOOK_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    there = join(opened, 0)
    assert opened.slots() == 1
    assert caplog.text.count("can't take connections") == 1
    there.close()
    waiting.close()


def test_the_token_of_agents_cannot_be_read_with_tls(placement):
    call = replace(CALL, token=b"a token for agents")
    heard = {}
    for tls in (False, True):
        opened = placement(key=ServerKey() if tls else None)
        tap = Wiretap(opened.port)
        lines = [member._join("127.0.0.1", tap.port, TOKEN, node, tls) for node in (0, 1)]
        opened.start((0, 1), call)
        assert [calls(line, 1) for line in lines] == [[0], [1]]
        tap.close()
        heard[tls] = call.token in tap.heard
    assert heard == {False: True, True: False}


@pytest.mark.parametrize(
    ("tls", "why"), [(True, "it doesn't use TLS"), (False, "it uses TLS, and this process doesn't")]
)
def test_tls_on_one_side_only_is_said_at_once(placement, tls, why):
    opened = placement(key=None if tls else ServerKey())
    with pytest.raises(LaunchError, match=f"refused this machine: {why}.*Give --tls on all machines, or on none"):
        join(opened, 0, tls=tls)
    join(opened, 0, tls=not tls)


def test_a_machine_is_told_why_it_is_refused(placement):
    opened = placement()
    with pytest.raises(LaunchError, match="refused this machine: it doesn't know FOOTPLATE_TOKEN"):
        join(opened, 1, "another-token-altogether")
    with pytest.raises(LaunchError, match="--node-rank 2 is none of --nnodes 2"):
        join(opened, 2)


def test_ranks_go_to_machines_by_their_number_in_whichever_order_they_come(placement):
    opened = placement(3, 2)
    last = join(opened, 2)
    opened.start(range(6), CALL)
    first = join(opened, 0)
    middle = join(opened, 1)
    assert [calls(line, 2) for line in (first, middle, last)] == [[0, 1], [2, 3], [4, 5]]


def test_a_machine_that_is_back_takes_the_place_of_its_own_lost_connection(placement, monkeypatch):
    monkeypatch.setattr(machines, "ANSWER_S", 0.5)
    opened = placement(1)
    lost = join(opened, 0)
    opened.start(range(1), CALL)
    assert calls(lost, 1) == [0]
    back = join(opened, 0)
    until = time.monotonic() + 60
    while not (failures := opened.lost()) and time.monotonic() < until:
        time.sleep(0.05)
    assert [(failure.index, failure.text) for failure in failures] == [(0, "machine 0 has gone")]
    opened.start(range(1), CALL)
    assert calls(back, 1) == [0]
    assert list(orders(lost)) == []


def test_a_number_that_is_given_twice_is_refused_while_the_first_one_answers(placement):
    opened = placement(1)
    first, told = join(opened, 0), []
    answers = threading.Thread(target=lambda: told.extend(calls(first, 1)))
    answers.start()
    second = join(opened, 0)
    refusal = next(orders(second))
    assert refusal["do"] == "refused"
    assert "--node-rank 0 has joined already" in refusal["why"]
    opened.start(range(1), CALL)
    answers.join(60)
    assert told == [0]


def test_missing_machines_are_named_at_once_and_when_time_is_up(placement, monkeypatch, caplog):
    monkeypatch.setattr(machines, "JOIN_S", 1.0)
    monkeypatch.setattr(machines, "WARN_S", 0.1)
    opened = placement(3)
    there = join(opened, 1)
    wait_until(lambda: opened._missing() == [0, 2])
    with pytest.raises(
        LaunchError, match=r"after 1 s, no machine has joined as --node-rank 0, 2\. .* loopback address"
    ):
        opened.slots()
    assert "no machine has joined as --node-rank 0, 2" in caplog.text
    there.close()


def test_a_lost_machine_that_is_not_replaced_is_named(placement, monkeypatch, caplog):
    monkeypatch.setattr(machines, "REPLACE_S", 3.0)
    opened = placement(2, 2)
    there = join(opened, 0)
    wait_until(lambda: opened._missing() == [1])
    opened.start(range(4), CALL)
    assert "no machine has joined as --node-rank 1" in caplog.text
    assert opened.lost() == []
    failures: list = []
    wait_until(lambda: failures.extend(opened.lost()) or failures)
    assert [failure.index for failure in failures] == [2, 3]
    assert "no machine has joined as --node-rank 1" in failures[0].text
    there.close()


def test_the_slots_of_the_machines_that_are_there_are_enough(placement):
    opened = placement(3, workers_per_node=2, min_nodes=2)
    slots = (0, 1, 2, 3, 4, 5)
    lines = [join(opened, 2)]
    wait_until(lambda: opened._missing() == [0, 1])
    assert opened.present(slots) == ()
    lines.append(join(opened, 0))
    assert opened.slots() == 6
    assert opened.present(slots) == (0, 1, 4, 5)
    lines.append(join(opened, 1))
    wait_until(lambda: opened.present(slots) == slots)


def test_calls_go_to_the_machines_of_the_slots(placement):
    opened = placement(3, workers_per_node=2, min_nodes=1)
    lines = {node: join(opened, node) for node in (0, 2)}
    wait_until(lambda: len(opened.present((0, 2, 4))) == 2)
    opened.start((0, 1, 4, 5), CALL)
    assert calls(lines[0], 2) == [0, 1]
    assert calls(lines[2], 2) == [2, 3]


def test_a_machine_that_is_silent_is_not_there_until_it_answers(placement, monkeypatch):
    monkeypatch.setattr(machines, "ANSWER_S", 0.5)
    opened = placement(2, min_nodes=1)
    line = {node: join(opened, node) for node in (0, 1)}
    threading.Thread(target=list, args=(orders(line[0]),), daemon=True).start()
    wait_until(lambda: opened.present((0, 1)) == (0,))
    threading.Thread(target=list, args=(orders(line[1]),), daemon=True).start()
    wait_until(lambda: opened.present((0, 1)) == (0, 1))


def test_a_machine_that_is_asked_to_end_leaves_when_the_others_are_enough(placement):
    opened = placement(3, min_nodes=2)
    lines = {node: join(opened, node) for node in range(3)}
    wait_until(lambda: opened.present((0, 1, 2)) == (0, 1, 2))
    lines[1].send(signal=signal.SIGTERM)
    wait_until(opened.leaving)
    assert opened.present((0, 1, 2)) == (0, 2)
    opened.close()
    assert not opened.leaving()
    assert next(order for order in orders(lines[1]) if order["do"] == "bye")["code"] == 143


def test_a_machine_that_is_asked_to_end_ends_the_launch_when_the_others_are_too_few(placement):
    opened = placement(2, min_nodes=2)
    lines = {node: join(opened, node) for node in range(2)}
    wait_until(lambda: len(opened._members) == 2)
    with heard_signals() as heard:
        lines[1].send(signal=signal.SIGTERM)
        wait_until(lambda: heard)
    assert heard == [signal.SIGTERM]


@contextlib.contextmanager
def heard_signals() -> Iterator[list[int]]:
    """While entered, SIGTERM is only recorded."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_driver_learns_why_an_agent_could_not_begin(placement):
    opened = placement(1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    machine = threading.Thread(target=member.join, args=(opened.host, opened.port, TOKEN, 0))
    machine.start()
    assert opened.slots() == 1
    opened.start(range(1), AgentCall("127.0.0.1", port, b""))
    until = time.monotonic() + 120
    while not (failures := opened.lost()) and time.monotonic() < until:
        time.sleep(0.05)
    opened.dismiss(0)
    machine.join()
    assert "its agent on machine 0 ended with exit code 1: The agent on" in failures[0].text
    assert f"can't reach the driver at 127.0.0.1:{port}" in failures[0].text


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_cannot_connect_to_is_refused(host):
    with pytest.raises(ConfigError, match=r"which the other machines can't connect to\. Give the address"):
        MachinePlacement(2, 1, host, 0, TOKEN)


def test_a_name_that_is_this_machines_loopback_is_refused(monkeypatch):
    """The situation on Debian, whose /etc/hosts gives 127.0.1.1 to the machine's own name."""
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    with pytest.raises(ConfigError, match=r"--master-addr node-a .*: on this machine that is 127\.0\.1\.1"):
        MachinePlacement(2, 1, "node-a", 0, TOKEN)
