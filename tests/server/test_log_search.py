"""Search in output: its hits, its limits, and that it tells nothing about secrets."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.errors import Unavailable
from footplate.jobs.redaction import Mask
from footplate.jobs.supervision.follow import Line
from footplate.server.log_search import LONGEST, MOST, search

SECRET = "hf_Abcdefghijkl"


def lines(*texts: str, source: str = "master-0", attempt: int = 1) -> list[Line]:
    return [Line(attempt, source, f"{text}\n") for text in texts]


def test_lines_are_found_in_any_case_and_numbered_by_process():
    output = [
        *lines("first", "an Error"), *lines("ERROR: x", source="worker-0"), *lines("error", attempt=2),
        *lines("a \x1b[31mer\x1b[0mror"),
    ]  # fmt: skip
    matches = search(output, "eRRor", Mask())
    assert (matches.count, matches.complete) == (4, True)
    assert [(hit.attempt, hit.source, hit.number, hit.text) for hit in matches.hits] == [
        (1, "master-0", 2, "an Error"), (1, "worker-0", 1, "ERROR: x"), (2, "master-0", 1, "error"),
        (1, "master-0", 3, "a error"),
    ]  # fmt: skip
    assert [hit.number for hit in search(output, "error", Mask(), 1, "master-0").hits] == [2, 3]
    assert search(output, ".", Mask()).count == 0


@given(st.integers(0, len(SECRET) - 1), st.integers(1, len(SECRET)), st.sampled_from(["", "\x1b[1m"]))
def test_a_search_finds_no_part_of_a_secret(begin: int, length: int, colour: str):
    output = lines(f"<{SECRET[:5]}{colour}{SECRET[5:]}>", "nothing")
    part = SECRET[begin : begin + length]
    matches = search(output, part, Mask([SECRET]))
    # Only what stands in its place can be found.
    assert [hit.text for hit in matches.hits] == [text for text in ("<[hidden]>", "nothing") if part.casefold() in text]


def test_the_last_hits_are_kept_all_are_counted_and_long_lines_are_cut():
    matches = search(lines(*(f"line {number}" for number in range(3 * MOST))), "line", Mask())
    assert (matches.count, len(matches.hits), matches.hits[-1].number) == (3 * MOST, MOST, 3 * MOST)
    (hit,) = search(lines("x" * 50_000 + "here" + "y" * 50_000), "here", Mask()).hits
    assert len(hit.text) == LONGEST
    assert "here" in hit.text


def test_a_search_ends_when_its_time_is_over():
    began = time.monotonic()
    matches = search((Line(1, "master-0", "x\n") for _ in itertools.count()), "x", Mask(), limit_s=0.2)
    assert time.monotonic() - began < 20
    assert not matches.complete
    assert 0 < len(matches.hits) <= MOST


def test_too_many_searches_are_refused():
    there, ended = threading.Barrier(3), threading.Event()

    def blocks() -> Iterator[Line]:
        there.wait()
        ended.wait()
        yield from lines("x")

    threads = [threading.Thread(target=search, args=(blocks(), "x", Mask())) for _ in range(2)]
    for thread in threads:
        thread.start()
    there.wait()
    with pytest.raises(Unavailable, match="too many searches run now"):
        search(lines("x"), "x", Mask(), limit_s=0.05)
    ended.set()
    for thread in threads:
        thread.join()
    assert search(lines("x"), "x", Mask()).count == 1
