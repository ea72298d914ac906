"""Output of workers: with the rank before each line, on a terminal, in files, and without a real file.

No worker uses torch, so the launches preload nothing.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.launch import launch
from footplate.launch.output import Lines

ROOT = Path(__file__).parent.parent.parent


def test_each_line_has_its_rank_before_it(capsys):
    def work():
        print("to standard output\nand more")
        print("to standard error", file=sys.stderr)
        os.write(1, b"from below Python\n")
        print("without an end", end="")

    launch(work, world_size=2, preload=())
    out, err = capsys.readouterr()
    for rank in "01":
        lines = [line.removeprefix(f"[rank {rank}] ") for line in out.splitlines() if line.startswith(f"[rank {rank}]")]
        assert lines == ["to standard output", "and more", "from below Python", "without an end"]
    assert sorted(err.splitlines()) == ["[rank 0] to standard error", "[rank 1] to standard error"]


def test_a_line_appears_when_it_is_written(program):
    script = program("""
import time
from footplate.launch import launch
def work():
    print("now")
    time.sleep(60)
launch(work, world_size=1, preload=())
""")
    assert script.read_until("now") == "[rank 0] now\n"


def test_output_is_kept_whole_for_each_attempt_and_rank(tmp_path, quick_but_patient, capsys):
    def work():
        print("out", os.environ["RANK"])
        print("err", os.environ["RANK"], file=sys.stderr)
        if os.environ["FOOTPLATE_ATTEMPT"] == "0" and os.environ["RANK"] == "1":
            raise ValueError("of rank 1")

    launch(work, world_size=2, restarts=quick_but_patient, log_dir=tmp_path, preload=())
    files = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.glob("*/*")}
    assert set(files) == {f"attempt-{attempt}/rank-{rank}.log" for attempt in (0, 1) for rank in (0, 1)}
    assert sorted(files["attempt-0/rank-0.log"].splitlines()) == ["err 0", "out 0"]
    assert "ValueError: of rank 1\n" in files["attempt-0/rank-1.log"]
    assert sorted(files["attempt-1/rank-1.log"].splitlines()) == ["err 1", "out 1"]


def test_a_full_disk_under_the_logs_does_not_end_the_run(tmp_path, said, capsys):
    (tmp_path / "attempt-0").mkdir()
    (tmp_path / "attempt-0" / "rank-0.log").symlink_to("/dev/full")
    assert launch(lambda: print("shown") or 1, world_size=1, log_dir=tmp_path, preload=()) == 1
    assert capsys.readouterr().out == "[rank 0] shown\n"
    assert "the output of rank 0 is no longer kept" in said.text


def test_what_a_killed_rank_had_written_is_shown(capsys, quick):
    def work():
        if os.environ["FOOTPLATE_ATTEMPT"] == "0":
            os.write(1, b"x" * 60_000 + b" its last words")
            os.kill(os.getpid(), 9)

    launch(work, world_size=1, restarts=quick, preload=())
    assert "its last words\n" in capsys.readouterr().out


@pytest.mark.parametrize("stand_in", [io.StringIO(), None])
def test_it_works_where_standard_output_is_no_file(monkeypatch, stand_in):
    monkeypatch.setattr(sys, "stdout", stand_in)
    assert launch(lambda: print("hello") or 1, world_size=2, preload=()) == 1
    if stand_in is not None:
        assert sorted(stand_in.getvalue().splitlines()) == ["[rank 0] hello", "[rank 1] hello"]


def test_letters_that_a_stream_does_not_know_do_no_harm(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    launch(lambda: print("Zürich"), world_size=1, preload=())
    assert out.buffer.getvalue() == b"[rank 0] Z\\xfcrich\n"


def test_on_a_terminal_rank_0_has_a_terminal_of_the_same_size(tmp_path):
    text, log = on_a_terminal(tmp_path, """
def work():
    if os.environ["RANK"] == "0":
        print(sys.stdout.isatty(), sys.stderr.isatty(), tuple(os.get_terminal_size(1)))
        print("50 %", end="\\r100 %\\n")
    else:
        print(sys.stdout.isatty())
""")  # fmt: skip
    assert "[rank 1] False\r\n" in text
    assert "True True (101, 31)\r\n50 %\r100 %\r\n" in text.replace("[rank 1] False\r\n", "")
    assert log == "True True (101, 31)\n50 %\r100 %\n"


def test_on_a_terminal_a_line_of_another_rank_stays_out_of_the_progress_bar(tmp_path):
    text, _ = on_a_terminal(tmp_path, """
def work():
    def seen(text):
        while text not in open("terminal").read():
            time.sleep(0.01)

    if os.environ["RANK"] == "0":
        print("50 %", end="", flush=True)
        seen("hello")
    else:
        seen("50 %")
        print("hello", flush=True)
""")  # fmt: skip
    assert "50 %\r\x1b[K[rank 1] hello\r\n" in text


def on_a_terminal(place: Path, work: str) -> tuple[str, str]:
    """The output of `work` in a terminal of 101 columns and 31 rows, and rank 0's log.

    What has been seen up to now is in the file `terminal`.
    """
    import termios

    script = place / "program.py"
    script.write_text(f"""
import os, sys, time
from footplate.launch import launch
{work}
launch(work, world_size=2, log_dir="logs", preload=())
""")
    (place / "terminal").touch()
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (31, 101))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=place,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 4096):
            seen += piece
            (place / "terminal").write_bytes(seen)
    except OSError:  # its end
        pass
    os.close(ours)
    assert process.wait(60) == 0, seen
    return seen.decode(), (place / "logs/attempt-0/rank-0.log").read_bytes().decode()


texts = st.text(st.sampled_from("aä€\r\n"), max_size=20)


@given(texts, st.lists(st.integers(0, 60), max_size=4))
def test_lines_are_the_same_however_the_bytes_come(text, cuts):
    data, lines, start = text.encode(), Lines(), 0
    pieces = []
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        pieces += lines.feed(data[start:cut])
        start = cut
    pieces += lines.end()
    assert "".join(pieces).removesuffix("\n") == text.removesuffix("\n")
    assert all(re.fullmatch(r"[^\r\n]*(\r\n|\r|\n)", line) for line in pieces)


def test_a_line_without_end_is_cut():
    lines = Lines()
    assert "".join(lines.feed(b"x" * 70_000)) == "x" * 70_000 + "\n"
