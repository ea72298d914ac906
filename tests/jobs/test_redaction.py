"""Secrets of the environment appear neither in a job's output nor in the server's answers."""

from __future__ import annotations

import os
import sys

from hypothesis import given
from hypothesis import strategies as st

from footplate.jobs.backends.local.attempt import LocalAttempt, Member
from footplate.jobs.redaction import HIDDEN, Mask, StreamMask, secrets

SECRETS = st.text(st.characters(codec="ascii", exclude_categories=["C"]), min_size=8, max_size=30)


def test_what_looks_like_a_secret_by_its_name_is_one():
    environ = {
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI", "HF_TOKEN": "hf_abcdefgh", "DB_PASSWORD": "hunter2hunter2",
        "PATH": "/usr/local/bin", "GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key.json", "SHORT_TOKEN": "abc",
    }  # fmt: skip
    mask = Mask.of(environ, "the-server's-own")
    for secret in ("wJalrXUtnFEMI", "hf_abcdefgh", "hunter2hunter2", "the-server's-own"):
        assert mask.text(f"it is {secret}!") == f"it is {HIDDEN}!"
    for text in ("/usr/local/bin", "/home/me/key.json", "abc"):
        assert mask.text(text) == text


def test_a_password_in_a_url_is_one():
    said = Mask().text("reading postgresql://me:mine@db:5432/jobs and https://me@host/")
    assert said == f"reading postgresql://me:{HIDDEN}@db:5432/jobs and https://me@host/"
    assert Mask().text("https://ghp_0123456789abcdef@host/") == f"https://{HIDDEN}@host/"
    assert secrets(
        {"INDEX": "https://ghp_0123456789abcdef@a/ http://me:mine-alone@b/", "STORE": "postgresql://me@c/"}
    ) == {
        "ghp_0123456789abcdef",
        "mine-alone",
    }


def test_a_secret_of_many_lines_is_hidden_in_each():
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC\n"
    mask = Mask.of({"SIGNING_KEY": key})
    for line in key.splitlines():
        assert mask.text(f"> {line}") == f"> {HIDDEN}"


PIECES = st.lists(st.text("abcé", max_size=6) | st.sampled_from(["abcabcab", "cabcabcabé", "\n"]), max_size=8)


@given(PIECES, st.lists(st.integers(0, 80), max_size=6))
def test_a_stream_is_without_them_wherever_its_pieces_end(pieces, cuts):
    known = ["abcabcab", "cabcabcabé"]
    whole = "".join(pieces).encode()
    stream_mask, shown, at = StreamMask(known), b"", 0
    for cut in [*sorted(cuts), len(whole)]:
        shown += stream_mask.feed(whole[at:cut])
        at = max(at, cut)
    shown += stream_mask.end()
    assert shown == Mask(known).text(whole.decode()).encode()
    assert not any(secret.encode() in shown for secret in known)


def test_a_stream_waits_only_for_what_may_be_a_secret():
    stream_mask = StreamMask(["hf_abcdefgh"])
    assert stream_mask.feed(b"a line\nhf_no\nhf_abc") == b"a line\nhf_no\n"
    assert stream_mask.feed(b"defgh, and") == f"{HIDDEN}, and".encode()
    assert stream_mask.feed(b" hf_") == b" "
    assert stream_mask.end() == b"hf_"
    assert StreamMask().feed(b"\xff\xc3") == b"\xff\xc3"


def test_what_a_process_was_given_as_a_secret_is_not_in_its_log(tmp_path):
    program = (
        "import os; own = os.environ['HF_TOKEN']; print('it is', own, flush=True); raise SystemExit(f'lost {own}')"
    )
    environment = {**os.environ, "HF_TOKEN": "hf_abcdefgh"}
    log = tmp_path / "master-0.log"
    gang = LocalAttempt([Member("master", 0, [sys.executable, "-c", program], environment, str(tmp_path), log)])
    while not gang.over:
        gang.wait(0.1)
    gang.close()
    assert log.read_text() == f"it is {HIDDEN}\nlost {HIDDEN}\n"
    assert "hf_abcdefgh" not in gang.processes[0].outcome


@given(st.lists(SECRETS, min_size=1, max_size=4), st.text(max_size=20), st.text(max_size=20))
def test_wherever_it_is_in_plain_values(secrets, before, after):
    value = {"args": [f"{before}{secret}{after}" for secret in secrets], **dict.fromkeys(secrets, 1)}
    masked = str(Mask(secrets).all(value))
    assert HIDDEN in masked
    assert not any(secret in argument for secret in secrets for argument in Mask(secrets).all(value)["args"])


def test_the_longer_of_two_secrets_is_hidden_whole():
    assert Mask(["abcdefgh", "abcdefghijkl"]).text("abcdefghijkl") == HIDDEN
