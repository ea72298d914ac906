"""Access control: allowed and refused requests, regardless of the headers."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.errors import ConfigError
from footplate.server.auth import Token, take
from footplate.server.guard import Refusal, check, is_ours

SECRET = "s3cret-s3cret-s3cret"
TOKEN = Token.of(SECRET)
HERE = {b"host": b"127.0.0.1:8650"}
METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS")


def status(method: str, path: str, headers: dict[bytes, bytes], token: Token | None = None) -> int:
    try:
        check(method, path, {**HERE, **headers}, token)
    except Refusal as refusal:
        return refusal.status
    return 200


def test_a_name_that_was_made_to_lead_here_is_refused_whatever_is_asked():
    for host in (
        b"evil.example",
        b"evil.example:8650",
        b"127.0.0.1.evil.example",
        b"localhost.evil.example",
        b"",
        b"[::1",
    ):
        assert status("GET", "/", {b"host": host}) == 403
        assert status("GET", "/api/jobs", {b"host": host}, TOKEN) == 403
    for host in ("127.0.0.1", "localhost:1", "[::1]:8650", "192.168.0.7:80", socket.gethostname()):
        assert status("GET", "/", {b"host": host.encode()}) == 200


@given(st.from_regex(r"[a-z]{1,9}(\.[a-z]{2,5}){1,2}(:[0-9]{1,5})?", fullmatch=True))
def test_no_name_of_the_internet_is_ours(host):
    assert not is_ours(host) or host.partition(":")[0] in (socket.gethostname().lower(), socket.getfqdn().lower())


def test_another_sites_page_is_refused():
    for site in (b"cross-site", b"same-site"):
        assert status("GET", "/api/jobs", {b"sec-fetch-site": site}) == 403
    for origin in (b"http://evil.example", b"null", b"http://127.0.0.1:9999", b"http://localhost:8650"):
        assert status("POST", "/api/check", {b"origin": origin, b"x-footplate": b"1"}) == 403
    own = {b"sec-fetch-site": b"same-origin", b"origin": b"http://127.0.0.1:8650", b"x-footplate": b"1"}
    assert status("POST", "/api/check", own) == 200


@given(st.sampled_from(METHODS), st.dictionaries(st.binary(max_size=12), st.binary(max_size=20), max_size=4))
def test_without_the_header_that_no_form_can_send_nothing_is_changed(method, headers):
    headers.pop(b"x-footplate", None)
    if method not in ("GET", "HEAD", "OPTIONS"):
        assert status(method, "/api/jobs", headers) == 403


@given(st.sampled_from(METHODS), st.binary(max_size=40))
def test_only_the_token_opens_the_api(method, given):
    wanted = f"Bearer {SECRET}".encode()
    assert status(method, "/api/jobs", {b"authorization": wanted, b"x-footplate": b"1"}, TOKEN) == 200
    if given.partition(b" ")[2].strip() != SECRET.encode():
        assert status(method, "/api/jobs", {b"authorization": given, b"x-footplate": b"1"}, TOKEN) == 401
    assert status(method, "/api/jobs", {b"authorization": b"Basic " + SECRET.encode()}, TOKEN) == 401
    assert status("GET", "/app.js", {}, TOKEN) == 200  # the page itself, which asks for the token


def test_a_token_leaves_the_environment_and_shows_nowhere(tmp_path):
    environ = {"FOOTPLATE_TOKEN": SECRET, "PATH": "/bin"}
    token, text = take(None, environ)
    assert (token, text, environ) == (TOKEN, SECRET, {"PATH": "/bin"})
    assert SECRET not in repr(token)
    file = tmp_path / "token"
    file.write_text(f"{SECRET}-of-the-file\n")
    file.chmod(0o600)
    environ["FOOTPLATE_TOKEN"] = SECRET
    assert take(file, environ) == (Token.of(f"{SECRET}-of-the-file"), f"{SECRET}-of-the-file")
    assert environ == {"PATH": "/bin"}
    assert take(None, {}) == (None, None)


def test_a_token_that_protects_nothing_is_refused(tmp_path):
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match="can't be read"):
        take(file, {})
    file.write_text(SECRET)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"can be read by other users. Restrict it: chmod 600"):
        take(file, {})
    for text in ("", "short", "two words of some length", "ünïcödé-ünïcödé-ünï"):
        with pytest.raises(ConfigError, match="expected a token of at least 16") as raised:
            take(None, {"FOOTPLATE_TOKEN": text})
        assert not text or text not in str(raised.value)
