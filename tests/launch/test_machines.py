"""The lobby of machines without a cluster's engine: who comes in, who doesn't, and which machine has which ranks."""

from __future__ import annotations

import re
import resource
import socket
import threading
import time
from pathlib import Path

import pytest

from footplate.core.errors import ConfigError, LaunchError
from footplate.launch.cluster import machines, member
from footplate.launch.cluster.agent import AgentCall
from footplate.launch.cluster.machines import Line, Lobby

TOKEN = "the-token-of-these-tests"
CALL = AgentCall("127.0.0.1", 1, b"")


@pytest.fixture
def lobby():
    """Makes lobbies on this machine; closed at the end."""
    made = []

    def make(nodes=2, places=1):
        made.append(Lobby(nodes, places, "127.0.0.1", 0, TOKEN))
        return made[-1]

    yield make
    for one in made:
        one.dismiss(0)


def stranger(lobby: Lobby, says: bytes = b"") -> socket.socket:
    connection = socket.create_connection((lobby.host, lobby.port))
    connection.settimeout(60)
    connection.sendall(says)
    return connection


def come_in(lobby: Lobby, node: int, token: str = TOKEN) -> Line:
    return member._enter(lobby.host, lobby.port, token, node)


def wait_until(holds) -> None:
    """Until something holds that a thread of the lobby brings about; at most 20 s."""
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def calls(line: Line, count: int) -> list[int]:
    """The places that a machine is to carry."""
    found = [line.receive() for _ in range(count)]
    return [message["index"] for message in found if message and message["do"] == "start"]


def test_strangers_are_sent_away_and_never_more_than_some_are_listened_to(lobby, monkeypatch):
    monkeypatch.setattr(machines, "GREET_S", 1.0)
    hall = lobby()
    before = threading.active_count()
    silent = [stranger(hall) for _ in range(3 * machines.STRANGERS)]
    come_in(hall, 1)
    assert threading.active_count() <= before + machines.STRANGERS + 2
    for one in silent:
        while one.recv(100):
            pass  # its nonce, and then the end
        one.close()


def test_a_stranger_who_speaks_slowly_has_no_more_time(lobby, monkeypatch):
    monkeypatch.setattr(machines, "GREET_S", 1.0)
    slow = stranger(lobby())
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


@pytest.mark.parametrize("says", [b"[1, 2]\n", b"1\n", b"nonsense\n", b"[" * 60_000 + b"\n", b'{"node": [1]}\n'])
def test_a_greeting_that_is_none_disturbs_nobody(says, lobby, monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    hall = lobby()
    odd = stranger(hall, says)
    while odd.recv(1000):
        pass
    come_in(hall, 0)
    assert raised == []


def test_refused_strangers_are_counted_and_do_not_fill_the_log(lobby, monkeypatch, caplog):
    hall = lobby(1)
    for _ in range(20):
        with stranger(hall, b"nonsense\n") as odd:
            while odd.recv(1000):
                pass
    assert len(refusals(caplog)) == 1

    monkeypatch.setattr(hall._refusals, "_quiet_until", 0.0)
    until = time.monotonic() + 60
    while len(refusals(caplog)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert re.match(r"1\d connections were refused, the last one from 127.0.0.1: it doesn't know", refusals(caplog)[1])


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]


def test_a_lobby_without_a_file_descriptor_to_spare_opens_again(lobby, caplog):
    hall = lobby(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = socket.socket()
    with Path("/dev/null").open() as file:
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno(), hard))
        try:
            waiting.connect((hall.host, hall.port))
            time.sleep(3 * machines.LOOK_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    there = come_in(hall, 0)
    assert hall.slots() == 1
    assert caplog.text.count("can't take connections") == 1
    there.close()
    waiting.close()


def test_a_machine_is_told_why_it_is_refused(lobby):
    hall = lobby()
    with pytest.raises(LaunchError, match="refused this machine: it doesn't know FOOTPLATE_TOKEN"):
        come_in(hall, 1, "another-token-altogether")
    with pytest.raises(LaunchError, match="--node-rank 2 is none of --nnodes 2"):
        come_in(hall, 2)


def test_ranks_go_to_machines_by_their_number_in_whichever_order_they_come(lobby):
    hall = lobby(3, 2)
    last = come_in(hall, 2)
    hall.start(6, CALL)
    first = come_in(hall, 0)
    middle = come_in(hall, 1)
    assert [calls(line, 2) for line in (first, middle, last)] == [[0, 1], [2, 3], [4, 5]]


def test_a_machine_that_is_back_takes_the_place_of_its_own_lost_connection(lobby, monkeypatch):
    monkeypatch.setattr(machines, "ANSWER_S", 0.5)
    hall = lobby(1)
    lost = come_in(hall, 0)
    hall.start(1, CALL)
    assert calls(lost, 1) == [0]
    back = come_in(hall, 0)
    until = time.monotonic() + 60
    while not (found := hall.lost()) and time.monotonic() < until:
        time.sleep(0.05)
    assert [(one.index, one.text) for one in found] == [(0, "machine 0 has gone")]
    hall.start(1, CALL)
    assert calls(back, 1) == [0]
    assert lost.receive() == {"do": "still there?"}
    assert lost.receive() is None


def test_a_number_that_is_given_twice_is_refused_while_the_first_one_answers(lobby):
    hall = lobby(1)
    first, second = come_in(hall, 0), None
    answers = threading.Thread(target=lambda: first.receive() and first.send(here=True))
    answers.start()
    second = come_in(hall, 0)
    message = second.receive()
    assert message is not None
    assert message["do"] == "refused"
    assert "--node-rank 0 is there already" in message["why"]
    answers.join()
    hall.start(1, CALL)
    assert calls(first, 1) == [0]


def test_missing_machines_are_named_at_once_and_when_time_is_up(lobby, monkeypatch, caplog):
    monkeypatch.setattr(machines, "JOIN_S", 1.0)
    monkeypatch.setattr(machines, "TELL_S", 0.1)
    hall = lobby(3)
    there = come_in(hall, 1)
    wait_until(lambda: hall._missing() == [0, 2])
    with pytest.raises(LaunchError, match=r"after 1 s, there is nobody of --node-rank 0, 2\. .* loopback address"):
        hall.slots()
    assert "there is nobody of --node-rank 0, 2" in caplog.text
    there.close()


def test_a_lost_machine_that_is_not_replaced_is_named(lobby, monkeypatch, caplog):
    monkeypatch.setattr(machines, "REPLACE_S", 3.0)
    hall = lobby(2, 2)
    there = come_in(hall, 0)
    wait_until(lambda: hall._missing() == [1])
    hall.start(4, CALL)
    assert "there is nobody of --node-rank 1" in caplog.text
    assert hall.lost() == []
    found: list = []
    wait_until(lambda: found.extend(hall.lost()) or found)
    assert [one.index for one in found] == [2, 3]
    assert "nobody of --node-rank 1" in found[0].text
    there.close()


def test_why_an_agent_could_not_begin_is_known_at_home(lobby):
    hall = lobby(1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    machine = threading.Thread(target=member.join, args=(hall.host, hall.port, TOKEN, 0))
    machine.start()
    assert hall.slots() == 1
    hall.start(1, AgentCall("127.0.0.1", port, b""))
    until = time.monotonic() + 120
    while not (found := hall.lost()) and time.monotonic() < until:
        time.sleep(0.05)
    hall.dismiss(0)
    machine.join()
    assert "its agent on machine 0 ended with exit code 1: The worker's place on" in found[0].text
    assert f"can't reach the driver at 127.0.0.1:{port}" in found[0].text


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_cannot_connect_to_is_refused(host):
    with pytest.raises(ConfigError, match=r"which the other machines can't connect to\. Give the address"):
        Lobby(2, 1, host, 0, TOKEN)


def test_a_name_that_is_this_machines_loopback_is_refused(monkeypatch):
    """As on Debian, whose /etc/hosts gives 127.0.1.1 to the machine's own name."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(ConfigError, match=r"--master-addr node-a .*: on this machine that is 127\.0\.1\.1"):
        Lobby(2, 1, "node-a", 0, TOKEN)
