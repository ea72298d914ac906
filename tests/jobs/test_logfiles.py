"""Output of processes: kept in a series of files, read while it grows, nothing lost and nothing twice."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from footplate.core.errors import ConfigError
from footplate.jobs.home import Home
from footplate.jobs.supervision import logfiles
from footplate.jobs.supervision.follow import Follower, Line
from footplate.jobs.supervision.logfiles import PIECE, Reader, Writer, cut_note, numbers, part

pieces = st.lists(st.tuples(st.binary(max_size=40), st.booleans()), max_size=30)


def rest(reader: Reader) -> bytes:
    """Read all remaining output."""
    return b"".join(iter(reader.read, b""))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces, st.integers(1, 60))
def test_whoever_reads_along_reads_all_once(tmp_path: Path, written: list[tuple[bytes, bool]], full: int):
    first = tmp_path / "master-0.log"
    for left in tmp_path.iterdir():
        left.unlink()
    writer, reader, read = Writer(first, full), Reader(first), b""
    for data, look in written:
        writer.write(data)
        if look:
            read += reader.read()
    writer.close()
    assert read + rest(reader) == b"".join(data for data, _ in written)


def test_a_log_that_is_larger_than_memory_is_read_in_pieces(tmp_path: Path):
    writer, reader = Writer(tmp_path / "master-0.log", full=2 * PIECE), Reader(tmp_path / "master-0.log")
    for _ in range(5):
        writer.write(b"x" * PIECE)
    writer.close()
    assert [len(reader.read()) for _ in range(6)] == [PIECE] * 5 + [0]


def test_a_full_file_is_followed_by_another(tmp_path: Path):
    writer = Writer(tmp_path / "master-0.log", full=10)
    for _ in range(5):
        writer.write(b"12345\n")
    writer.close()
    sizes = [part(tmp_path / "master-0.log", number).stat().st_size for number in range(3)]
    assert sizes == [12, 12, 6]


def test_a_later_writer_goes_on_in_the_last_file(tmp_path: Path):
    reader, read = Reader(tmp_path / "master-0.log"), b""
    for number in range(4):
        writer = Writer(tmp_path / "master-0.log", full=10)
        if number:
            assert writer.last_line() == f"line {number - 1}"
        writer.write(f"line {number}\n".encode() * 2)
        writer.close()
        read += rest(reader)
    assert read == b"".join(f"line {number}\n".encode() * 2 for number in range(4))


def test_the_last_line_that_says_something(tmp_path: Path):
    writer = Writer(tmp_path / "master-0.log")
    writer.write(b"Traceback\nValueError: x\n\n  \n")
    assert writer.last_line() == "ValueError: x"


def test_lines_come_whole_and_with_who_wrote_them(tmp_path: Path):
    home = Home(tmp_path)
    folder = home.attempt("job", 1)
    folder.mkdir(parents=True)
    master, worker = Writer(folder / "master-0.log"), Writer(folder / "worker-10.log")
    follower = Follower(home, "job")
    master.write(b"one\ntw")
    worker.write(b"three\n")
    assert [(line.source, line.text) for line in follower.lines()] == [("master-0", "one\n"), ("worker-10", "three\n")]
    master.write(b"o\nfour")
    assert [line.text for line in follower.lines()] == ["two\n"]
    assert [line.text for line in follower.lines(last=True)] == ["four\n"]


texts = st.lists(st.sampled_from(["a", "bc", "é", "\n", "\r", "\r\n"]), max_size=40).map("".join)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(texts, max_size=4), st.integers(1, 20), st.integers(1, 4), st.integers(0, 12), st.booleans())
def test_the_tail_is_the_last_lines(
    tmp_path: Path, logs: list[str], full: int, piece: int, count: int, only_one: bool
) -> None:
    home = Home(tmp_path)
    shutil.rmtree(home.job("my_job"), ignore_errors=True)
    for number, text in enumerate(logs):
        first = home.job("my_job") / f"attempt-{1 + number // 2}" / f"worker-{number % 2}.log"
        first.parent.mkdir(parents=True, exist_ok=True)
        writer = Writer(first, full)
        for letter in text.encode():
            writer.write(bytes([letter]))
        writer.close()
    attempt, source = (1, "worker-0") if only_one else (None, None)

    def wanted(follower: Follower) -> list[Line]:
        return [
            line for line in follower.lines(last=True)
            if attempt in (None, line.attempt) and source in (None, line.source)
        ]  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logfiles, "PIECE", piece)  # so that pieces end within line ends
        follower = Follower(home, "my_job")
        follower.skip_to_tail(count, attempt, source)
        tail = wanted(follower)
        assert not count or tail[-count:] == wanted(Follower(home, "my_job"))[-count:]
        assert len(tail) <= count + len(logs)  # an unfinished line of each log comes on top


def test_the_tail_of_a_large_log_is_read_from_its_end(tmp_path: Path):
    home = Home(tmp_path)
    (home.job("my_job") / "attempt-1").mkdir(parents=True)
    writer = Writer(home.job("my_job") / "attempt-1" / "master-0.log")
    for _ in range(20):
        writer.write(b"a line of the beginning\n" * (PIECE // 24))
    writer.write(b"one\ntwo\nthree\n")
    writer.close()

    follower, before = Follower(home, "my_job"), _bytes_read()
    follower.skip_to_tail(2)
    assert [line.text for line in follower.lines(last=True)] == ["two\n", "three\n"]
    assert _bytes_read() - before < 2 * PIECE


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])  # rchar


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=200), st.integers(40, 400))
def test_a_long_log_keeps_its_beginning_and_its_end_and_says_what_was_cut(
    tmp_path: Path, written: list[tuple[int, bool]], most: int
):
    first = tmp_path / "master-0.log"
    for left in tmp_path.iterdir():
        left.unlink()
    writer, follower, followed, lines = Writer(first, most=most), Reader(first), b"", []
    for number, (length, look) in enumerate(written):
        line = f"{number}-{'x' * length}\n".encode()
        lines.append(line)
        writer.write(line)
        if look:
            followed += rest(follower)
    writer.close()
    everything = b"".join(lines)
    assert writer.size == len(everything) == Writer(first, most=most).size
    assert sum(part(first, number).stat().st_size for number in numbers(first)) <= most + 4 * 40
    read = rest(Reader(first))
    if len(everything) <= most // 2:
        assert read == everything
    if cut_note(first).exists():
        beginning, note, end = read.partition(b"\n" + cut_note(first).read_bytes())
        assert note
        assert everything.startswith(beginning)
        assert everything.endswith(end)
        assert beginning
        assert end
        assert f"{len(everything) - len(beginning) - len(end)} bytes".encode() in note
    else:
        assert read == everything
    pieces = re.split(rb"\n\[Footplate\] \d+ bytes[^\n]*\n", followed + rest(follower))
    at = 0
    for (
        piece
    ) in pieces:  # a reader that follows has everything once, in order, but for what was cut before it came there
        at = everything.index(piece, at) + len(piece)
    if all(look for _, look in written):
        assert pieces == [everything]


def test_how_much_is_kept_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOOTPLATE_LOG_MB", "1")
    writer = Writer(tmp_path / "master-0.log")
    for _ in range(50):
        writer.write(b"x" * 2**17)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1.6 * 2**20
    for wrong in ("0", "-1", "nan", "1.5", "much"):
        monkeypatch.setenv("FOOTPLATE_LOG_MB", wrong)
        with pytest.raises(ConfigError, match="FOOTPLATE_LOG_MB"):
            logfiles.limit()
