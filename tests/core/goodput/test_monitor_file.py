"""A record of a training that is whole, that grows, and that is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.goodput import Cause, MonitorFile, read_sessions
from footplate.core.goodput import monitor_file as module

START = {"kind": "start", "time": 100.0, "epoch": 0, "step": 0, "world_size": 2, "device": "cpu", "setup_s": 1.5}
END = {"kind": "end", "time": 104.0, "step": 40, "status": "finished"}


def window(number: int, **more: Any) -> dict[str, Any]:
    seconds = {"input": 0.25, "transfer": 0.05, "step": 0.5, "callbacks": 0.1, "logging": 0.1}
    values = {
        "kind": "window",
        "time": 100.0 + number,
        "step": 10 * number,
        "batches": 10,
        "wall_s": 1.0,
        "seconds": seconds,
    }
    return {**values, **more}


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_rows_become_sessions():
    (session,) = read_sessions([START, window(1), {"kind": "epoch", "time": 101.0}, window(2), {"kind": "news"}, END])
    assert (session.began, session.time, session.last, session.ended) == (98.5, 100.0, 104.0, 104.0)
    assert (session.step, session.last_step, session.world_size, session.status) == (0, 20, 2, "finished")
    assert [(each.first_step, each.step) for each in session.windows] == [(0, 10), (10, 20)]
    assert session.windows[0].seconds == pytest.approx({Cause.TRAINING: 0.55, Cause.INPUT: 0.25, Cause.CALLBACKS: 0.2})


def test_what_the_causes_of_a_window_lack_is_unknown():
    (session,) = read_sessions([START, window(1, seconds={"step": 0.25, "astrology": 0.25}), window(2, seconds=None)])
    assert session.windows[0].seconds == {Cause.TRAINING: 0.25, Cause.UNKNOWN: 0.75}
    assert session.windows[1].seconds == {Cause.UNKNOWN: 1.0}


def test_a_window_with_more_seconds_than_time_is_scaled():
    (session,) = read_sessions([START, window(1, seconds={"step": 3.0, "input": 1.0})])
    assert session.windows[0].seconds == {Cause.TRAINING: 0.75, Cause.INPUT: 0.25}


def test_only_new_lines_are_read(tmp_path: Path):
    path = tmp_path / "monitor.jsonl"
    file = MonitorFile(path)
    assert file.sessions() == []
    path.write_text(lines(START, window(1)) + '{"kind": "window", "ti')
    assert [each.last_step for each in file.sessions()] == [10]
    assert file.damaged == 0

    with path.open("a") as more:
        more.write(lines(window(2))[len('{"kind": "window", "ti') :] + lines(window(3), END))
    (session,) = file.sessions()
    assert (session.last_step, session.status, len(session.windows)) == (30, "finished", 3)

    # Another run replaced the file.
    other = tmp_path / "other"
    other.write_text(lines({**START, "step": 7}))
    other.replace(path)
    assert [(each.step, each.windows) for each in file.sessions()] == [(7, [])]
    path.unlink()
    assert file.sessions() == []


def test_a_killed_process_left_half_a_row_before_the_next_start(tmp_path: Path):
    path = tmp_path / "monitor.jsonl"
    path.write_text(lines(START, window(1)) + '{"kind": "window", "time": 10' + lines({**START, "step": 5}, window(2)))
    file = MonitorFile(path)
    assert [(each.step, each.last_step) for each in file.sessions()] == [(0, 10), (5, 20)]
    assert file.damaged == 0


@pytest.mark.parametrize(
    "line",
    [
        "x", "[]", "{}", "null", '{"kind": 3}', '{"kind": "window"}', '{"kind": "start", "time": "now", "step": 0}',
        '{"kind": "window", "time": 1, "step": 2, "wall_s": -1}', '{"kind": "window", "time": 1, "step": NaN, "wall_s": 1}',
        '{"kind": "end", "time": 1e999, "step": 1}', "[" * 100_000, "\x00\xff",
    ],
)  # fmt: skip
def test_rows_that_cannot_be_read_are_counted_and_left_out(line: str, tmp_path: Path):
    path = tmp_path / "monitor.jsonl"
    path.write_text(lines(START, window(1)) + line + "\n\n" + lines(window(2), END), encoding="latin-1")
    file = MonitorFile(path)
    (session,) = file.sessions()
    assert ([each.step for each in session.windows], session.status, file.damaged) == ([10, 20], "finished", 1)


def test_a_directory_in_the_place_of_the_file_is_no_record(tmp_path: Path):
    (tmp_path / "monitor.jsonl").mkdir()
    assert MonitorFile(tmp_path / "monitor.jsonl").sessions() == []


def test_without_a_start_row_a_lower_step_begins_a_session():
    first, second = read_sessions([window(1), window(2), window(3, step=15), window(4, step=25)])
    assert (first.step, first.last_step, first.time) == (0, 20, 100.0)
    assert (second.step, second.last_step, second.time) == (5, 25, 102.0)


def test_many_windows_are_merged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST", 8)
    (session,) = read_sessions([START, *(window(number) for number in range(1, 101))])
    assert len(session.windows) < 8
    assert sum(each.wall_s for each in session.windows) == 100.0
    assert sum(each.seconds[Cause.INPUT] for each in session.windows) == pytest.approx(25.0)
    bounds = [session.step, *(each.step for each in session.windows)]
    assert [each.first_step for each in session.windows] == bounds[:-1]
    assert session.last_step == 1000


@given(st.binary(max_size=300) | st.text(alphabet='{"kind":swtarendo, 0123456789.-}\n', max_size=300).map(str.encode))
def test_any_bytes_leave_the_rows_after_them_readable(tmp_path_factory: pytest.TempPathFactory, content: bytes):
    path = tmp_path_factory.mktemp("any") / "monitor.jsonl"
    path.write_bytes(content + b"\n" + lines(START, window(1), END).encode())
    file = MonitorFile(path)
    *earlier, last = file.sessions()
    assert (last.time, last.status, [each.step for each in last.windows]) == (100.0, "finished", [10])
    assert len(earlier) + file.damaged <= content.count(b"\n") + 1
