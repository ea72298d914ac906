"""Rendezvous of Horovod's ranks with rank 0: by addresses that every machine can reach, without strangers."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from footplate.compat.horovod import meeting
from footplate.compat.horovod.errors import HorovodInternalError
from footplate.core.net.framing import encode_frame, receive_frame
from footplate.core.net.handshake import PROTOCOL, ClientHandshake

TOKEN = "t" * 32


class Server:
    """Rank 0 at an address of the loopback interface. Another such address stands for another machine."""

    def __init__(self, ranks: set[int]) -> None:
        self.listening = meeting._listen(one_machine=True)
        self.port = self.listening.getsockname()[1]
        self._pool = ThreadPoolExecutor(1)
        self.admitted: Future[dict[int, socket.socket]] = self._pool.submit(
            meeting._admit, self.listening, ranks, TOKEN
        )

    def published(self, *addresses: str) -> HashStore:
        store = HashStore()
        store.set("rank0", json.dumps({"addresses": addresses, "port": self.port, "token": TOKEN}))
        return store


def guess(rank: int) -> bytes:
    """A stranger's answer to the challenge, without the token."""
    details = {"rank": rank}
    return encode_frame({"protocol": PROTOCOL, "nonce": "n" * 32, "proof": "0" * 64, "details": details})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(meeting, "MEET_S", 20.0)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    server = Server({1})
    yield server
    server.listening.close()


def test_ranks_of_one_machine_meet_at_its_loopback_whatever_master_addr_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    store = HashStore()
    with ThreadPoolExecutor(4) as pool:
        gathered = pool.submit(meeting.gather, 4, store)
        reached = {rank: pool.submit(meeting.reach, rank, store) for rank in (1, 2, 3)}
        for rank, connection in gathered.result(30).items():
            reached[rank].result(30).sendall(b"hello")
            assert connection.recv(5) == b"hello"
    assert json.loads(store.get("rank0"))["addresses"] == ["127.0.0.1"]


def test_addresses_that_are_published_for_other_machines_are_no_loopbacks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meeting.socket, "gethostname", lambda: "localhost")
    assert meeting._outward(["127.0.0.1", "127.0.1.1", "::1", "fe80::1%eth0", "0.0.0.0", "10.0.0.5"]) == ["10.0.0.5"]
    assert not {"127.0.0.1", "::1"} & set(meeting._own_addresses())


def test_a_rank_passes_by_another_program_that_answers_at_an_address_of_rank_0(server: Server):
    with socket.create_server(("127.0.0.2", server.port)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            connection.sendall(b"220 mail.example.com\n")

        threading.Thread(target=answer, daemon=True).start()
        connection = meeting.reach(1, server.published("127.0.0.2", "127.0.0.1"))
    assert connection.getpeername()[0] == "127.0.0.1"
    assert list(server.admitted.result(20)) == [1]


def test_a_connection_that_a_rank_has_given_up_does_not_count(server: Server):
    with socket.create_connection(("127.0.0.1", server.port)) as given_up:
        handshake = ClientHandshake(TOKEN.encode(), meeting.PURPOSE)
        challenge = receive_frame(given_up)
        assert challenge is not None
        given_up.sendall(encode_frame(handshake.answer(challenge.message, {"rank": 1})))
        reply = receive_frame(given_up)
        assert reply is not None
        handshake.verify(reply.message)
    mine = meeting.reach(1, server.published("127.0.0.1"))
    mine.sendall(b"hello")
    assert server.admitted.result(20)[1].recv(5) == b"hello"


def test_strangers_that_say_nothing_or_guess_hold_nobody_up(server: Server):
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    for number, stranger in enumerate(strangers[:100]):
        stranger.sendall([guess(1), b"x" * 500, b"GET / HTTP/1.1\r\n\r\n"][number % 3])
    meeting.reach(1, server.published("127.0.0.1"))
    assert list(server.admitted.result(20)) == [1]
    for stranger in strangers:
        stranger.close()


def test_rank_0_without_a_file_descriptor_to_spare_pauses_and_accepts_again(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(meeting, "PAUSE_S", 0.1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        assert receive_frame(stranger) is not None  # rank 0 is accepting by now
        stranger.sendall(guess(1))
        assert stranger.recv(1) == b""
    other = socket.socket()
    with contextlib.ExitStack() as held:
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, hard))
        try:
            with contextlib.suppress(OSError):
                while True:  # until none is left
                    held.callback(os.close, os.dup(other.fileno()))
            other.connect(("127.0.0.1", server.port))
            until = time.monotonic() + 20
            while not caplog.records and time.monotonic() < until:
                time.sleep(0.05)
            started = time.process_time()
            time.sleep(0.5)
            assert time.process_time() - started < 0.25  # a loop without a pause takes all of a core
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    meeting.reach(1, server.published("127.0.0.1"))
    assert list(server.admitted.result(20)) == [1]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "rank 0 can't accept connections of other ranks"
    ]
    other.close()


def test_a_rank_that_does_not_come_is_named(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meeting, "MEET_S", 0.3)
    with pytest.raises(HorovodInternalError, match="not connected to rank 0 within 0 s: 1, 2"):
        meeting._admit(server.listening, {1, 2}, TOKEN)


def test_an_address_that_leads_nowhere_is_an_error_with_the_mend():
    store: Any = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store.set("rank0", json.dumps({"addresses": ["127.0.0.1"], "port": port, "token": TOKEN}))
    with pytest.raises(
        HorovodInternalError, match=r"Rank 1 can't connect to rank 0.*127.0.0.1: .*refused.*MASTER_ADDR"
    ):
        meeting.reach(1, store)
