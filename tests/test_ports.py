"""A port that a test has reserved belongs to no other process."""

from __future__ import annotations

import socket

import pytest
from ports import free_port


def test_a_free_port_is_given_to_who_asks_for_it_by_its_number_alone():
    port = free_port()
    for address in ("127.0.0.1", "127.0.0.2", ""):
        with pytest.raises(OSError, match="Address already in use"), socket.socket() as other:
            other.bind((address, port))
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(server.getsockname()):
        assert port != free_port()
    with pytest.raises(OSError, match="Connection refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1)
