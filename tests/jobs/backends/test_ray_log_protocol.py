"""The stream of an entry point: the output of replicas arrives unchanged at its other end."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from footplate.jobs.backends.ray.log_protocol import LONGEST, decode, encode, event, events_in

SOURCES = st.sampled_from(["master-0", "worker-11", "parameter_server-0", "evaluator-0", "prepare"])
OUTPUT = st.one_of(st.binary(max_size=300), st.text("ab\n\r\\ é|+", max_size=60).map(str.encode))


@given(st.lists(st.tuples(SOURCES, OUTPUT)))
def test_any_bytes_of_any_source_pass_unharmed(written: list[tuple[str, bytes]]):
    sent, received = defaultdict(bytes), defaultdict(bytes)
    stream = ""
    for source, data in written:
        sent[source] += data
        stream += encode(source, data).decode() + "something of Ray's\n"
    assert "\r" not in stream
    for line in stream.split("\n"):
        messages = decode(line)
        if messages:
            received[messages[0]] += messages[1]
    assert {key: value for key, value in received.items() if value} == {
        key: value for key, value in sent.items() if value
    }


def test_a_line_of_a_program_that_looks_like_an_event_is_its_output():
    forged = event("over", succeeded=True)
    assert decode(encode("master-0", forged).decode().removesuffix("\n")) == ("master-0", forged)


def test_long_lines_are_cut_for_what_carries_them():
    stream = encode("master-0", b"x" * (3 * LONGEST) + b"\n" + b"y")
    assert [len(line) for line in stream.split(b"\n")] == [LONGEST + 10] * 3 + [11, 0]
    pieces = [decoded[1] for line in stream.split(b"\n") if (decoded := decode(line.decode()))]
    assert b"".join(pieces) == b"x" * (3 * LONGEST) + b"\ny"


def test_long_events_are_put_together_and_a_half_one_waits():
    long, short = {"text": "é\\\n" * LONGEST}, {"text": "short"}
    stream = (event("stacks", **long) + encode("master-0", b"between\n") + event("over", **short)).decode()
    assert events_in(stream) == [{"event": "stacks", **long}, {"event": "over", **short}]
    assert events_in(stream[:-1]) == [{"event": "stacks", **long}]
    assert events_in(stream[: LONGEST + 100]) == []
