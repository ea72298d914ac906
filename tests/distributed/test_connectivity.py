"""Ranks that can't connect to each other: all raise, before gloo's time-out of half an hour."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from footplate.core.errors import ConfigError
from footplate.distributed import connectivity

SIZE = 3


@pytest.fixture
def stores() -> list[dist.TCPStore]:
    """A client of one store for each rank."""
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [first, *(dist.TCPStore("127.0.0.1", first.port, is_master=False) for _ in range(SIZE - 1))]


class Behind:
    """A store through which a rank publishes a port other than its own, as if a firewall closed its port."""

    def __init__(self, store: dist.TCPStore, port: int) -> None:
        self._store, self._port = store, port

    def set(self, key: str, value: str) -> None:
        if key.startswith("reach/1"):
            host, address, _ = json.loads(value)
            value = json.dumps([host, address, self._port])
        self._store.set(key, value)

    def __getattr__(self, name: str):
        return getattr(self._store, name)


def outcomes(stores, address: str | None = "127.0.0.1") -> list[str]:
    """The result of each rank: an error's text, or an empty one."""

    def outcome(rank: int) -> str:
        try:
            connectivity.check(stores[rank], rank, SIZE, address)
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(outcome, range(SIZE)))


@contextlib.contextmanager
def a_port(backlog: int) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as listener:
        yield listener.getsockname()[1]


def test_ranks_that_reach_each_other_go_on(stores):
    before = threading.active_count()
    assert outcomes(stores) == [""] * SIZE
    assert threading.active_count() <= before


def test_a_closed_port_is_an_error_on_all_ranks(stores):
    with a_port(1) as port:
        pass  # nobody listens there any more
    results = outcomes([stores[0], Behind(stores[1], port), stores[2]])
    assert len(set(results)) == 1
    assert results[0].startswith(
        f"Rank 0 on {socket.gethostname()} can't connect to rank 1 on {socket.gethostname()}, at "
    )
    assert f"127.0.0.1 port {port}: Connection refused. " in results[0]
    assert "firewalls" in results[0]


def test_a_port_that_never_answers_is_an_error_after_a_while(stores, monkeypatch):
    monkeypatch.setattr(connectivity, "CONNECT_S", 1.0)
    with a_port(8) as port:  # connected, and silent
        results = outcomes([stores[0], Behind(stores[1], port), stores[2]])
    assert len(set(results)) == 1
    assert f"port {port}: no answer within 1 s." in results[0]


def test_a_rank_whose_address_is_unknown_is_not_tried(stores):
    assert outcomes(stores, None) == [""] * SIZE
