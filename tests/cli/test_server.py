"""`footplate server`: startup errors. tests/server tests the server itself."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FOOTPLATE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FOOTPLATE_TOKEN", raising=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org", ""])
def test_others_may_not_ask_without_a_token(footplate, host):
    result = footplate("server", "--host", host)
    assert result.code == 2
    assert "other users could submit programs that run as you. Give a token" in result.err


def test_a_token_that_others_can_read_is_none(footplate, tmp_path):
    file = tmp_path / "token"
    file.write_text("0123456789abcdef")
    file.chmod(0o644)
    result = footplate("server", "--host", "0.0.0.0", "--token-file", str(file))
    assert result.code == 2
    assert f"chmod 600 {file}" in result.err
    assert "0123456789abcdef" not in result.err


def test_a_setting_that_every_request_would_stumble_over_is_said_at_once(footplate, monkeypatch):
    monkeypatch.setenv("FOOTPLATE_CPUS", "many")
    result = footplate("server", "--port", "0")
    assert result.code == 2
    assert 'FOOTPLATE_CPUS="many": expected the number of cores' in result.err


def test_a_port_that_is_taken_or_none_is_said(footplate):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = footplate("server", "--port", str(taken.getsockname()[1]))
    assert result.code == 2
    assert "Choose another port, or 0 for any that is free." in result.err
    assert "expected a number from 0 to 65535" in footplate("server", "--port", "65536").err
