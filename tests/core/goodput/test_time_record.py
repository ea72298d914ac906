"""The record of a run for charts: sums that stay exact, a bounded number of parts, and the time that is left."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.core.goodput.time_record import MOST, OTHER, TimeRecord


def window(time: float, step: int, wall_s: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"kind": "window", "time": time, "step": step, "wall_s": wall_s, "seconds": {"input": wall_s / 4}, **more}


def write(path: Path, *rows: Any) -> TimeRecord:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TimeRecord(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "monitor.jsonl"


def test_a_long_run_has_few_parts_of_equal_length_and_exact_sums(path: Path):
    count = 20_000
    rows = [window(1000.0 + index, index, samples=10, flops=2.0) for index in range(1, count + 1)]
    parts = write(path, {"kind": "start", "time": 1000.0, "step": 0}, *rows).snapshot().parts
    assert MOST // 4 < len(parts) < MOST
    assert math.fsum(part.wall_s for part in parts) == count
    assert math.fsum(part.seconds["input"] for part in parts) == count / 4
    assert math.fsum(part.seconds[OTHER] for part in parts) == 3 * count / 4
    assert sum(part.samples or 0 for part in parts) == 10 * count
    # No part is much coarser than the others, at the beginning as at the end.
    assert parts[0].wall_s == parts[len(parts) // 2].wall_s
    assert (parts[0].first_step, parts[-1].step) == (0, count)


def test_many_short_sessions_are_bounded_too(path: Path):
    rows = []
    for session in range(5 * MOST):
        rows += [{"kind": "start", "time": 10.0 * session, "step": session}, window(10.0 * session + 1, session + 1)]
    parts = write(path, *rows).snapshot().parts
    assert len(parts) < MOST
    assert math.fsum(part.wall_s for part in parts) == 5 * MOST


def test_only_new_lines_are_read_and_half_a_line_waits(path: Path):
    record = write(path, {"kind": "start", "time": 1.0, "step": 0}, window(2.0, 5))
    assert len(record.snapshot().parts) == 1
    line = json.dumps(window(3.0, 9))
    with path.open("a") as file:
        file.write(line[:20])
        file.flush()
        assert len(record.snapshot().parts) == 1
        file.write(line[20:] + "\n")
    assert [part.step for part in record.snapshot().parts] == [5, 9]
    path.unlink()
    assert record.snapshot().parts == ()


def test_the_advice_of_the_latest_training_is_kept(path: Path):
    def advice(text: Any) -> dict[str, Any]:
        return {"kind": "advice", "time": 3.0, "rule": "input", "text": text}

    start = {"kind": "start", "time": 1.0, "step": 0}
    record = write(path, start, advice("old"), start, advice("a"), advice(7), advice("b" * 5000), start, window(4.0, 2))
    first, second = record.snapshot().advice
    assert (first, len(second)) == ("a", 1000)


def test_rows_of_an_earlier_job_are_left_out(path: Path):
    write(path, {"kind": "start", "time": 1.0, "step": 0}, window(2.0, 5), {"kind": "start", "time": 100.0, "step": 5})
    snapshot = TimeRecord(path, since=50.0).snapshot()
    assert (snapshot.began, snapshot.parts) == (100.0, ())


def test_the_time_left_follows_from_the_latest_speed(path: Path):
    start = {"kind": "start", "time": 0.0, "step": 0, "total_steps": 100}
    slow = [window(100.0 * index, index, 100.0) for index in range(1, 11)]
    fast = [window(1000.0 + index, 10 + index) for index in range(1, 11)]
    record = write(path, start, *slow, {**start, "time": 1000.0, "step": 10}, *fast)
    snapshot = record.snapshot()
    assert snapshot.remaining_s(1010.0) == pytest.approx(80.0)
    assert snapshot.remaining_s(1030.0) == pytest.approx(60.0)
    # The last report is too old.
    assert snapshot.remaining_s(1200.0) is None


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"kind": "start", "time": 0.0, "step": 0}, window(1.0, 5)],
        [{"kind": "start", "time": 0.0, "step": 0, "total_steps": None}, window(1.0, 5)],
        [{"kind": "start", "time": 0.0, "step": 0, "total_steps": 10}],
        [{"kind": "start", "time": 0.0, "step": 0, "total_steps": 10}, window(1.0, 0)],
        [{"kind": "start", "time": 0.0, "step": 0, "total_steps": 10}, window(1.0, 5), {"kind": "end", "time": 1.0}],
    ],
)
def test_a_time_left_that_cant_be_known_is_none(path: Path, rows: list[Any]):
    assert write(path, *rows).snapshot().remaining_s(2.0) is None


def test_more_steps_than_planned_leave_no_negative_time(path: Path):
    start = {"kind": "start", "time": 0.0, "step": 0, "total_steps": 10}
    assert write(path, start, window(1.0, 50)).snapshot().remaining_s(2.0) == 0.0


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**30), st.floats(), st.text(max_size=5), st.lists(st.integers())
)
ROWS = st.fixed_dictionaries(
    {"kind": st.sampled_from(["start", "window", "advice", "end", "epoch", "other"])},
    optional={
        "time": VALUES | st.floats(0, 1e9), "step": VALUES, "wall_s": VALUES | st.floats(0, 1e3), "samples": VALUES,
        "seconds": VALUES | st.dictionaries(st.sampled_from(["input", "forward", "x"]), VALUES), "text": VALUES,
        "total_steps": VALUES,
    },
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(ROWS | VALUES, max_size=30), st.floats(0, 2e9))
def test_any_rows_make_a_record(tmp_path_factory: pytest.TempPathFactory, rows: list[Any], now: float):
    snapshot = write(tmp_path_factory.mktemp("rows") / "monitor.jsonl", *rows).snapshot()
    for part in snapshot.parts:
        assert math.fsum(part.seconds.values()) == pytest.approx(part.wall_s, rel=2e-3)
    remaining_s = snapshot.remaining_s(now)
    assert remaining_s is None or remaining_s >= 0.0
