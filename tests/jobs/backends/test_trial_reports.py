"""New lines of a trial's reports on a node: each is passed on once, and only when it is whole."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.jobs.backends.ray.attempt import RayAttempt
from footplate.jobs.backends.ray.listener import Output, Restart
from footplate.jobs.backends.ray.log_protocol import decode, encode
from footplate.jobs.tuning.measurements import read_reports
from footplate.jobs.tuning.report_lines import FILES, NewLines


def passed_on(reports: NewLines) -> dict[str, bytes]:
    return dict(reports.read())


@given(pieces=st.lists(st.binary(max_size=20)))
def test_a_trainers_lines_arrive_once_and_in_order_however_they_are_written(pieces: list[bytes]):
    with tempfile.TemporaryDirectory() as directory:
        reports, heard = NewLines(Path(directory)), b""
        for piece in pieces:
            with (Path(directory) / "reports.jsonl").open("ab") as file:
                file.write(piece)
            heard += passed_on(reports).get("reports", b"")
    written = b"".join(pieces)
    assert heard == written[: written.rfind(b"\n") + 1]


def test_what_hypertune_writes_anew_each_time_arrives_once(tmp_path: Path):
    """Its file may be read while it is written, and keeps the last lines only."""
    reports, heard = NewLines(tmp_path), b""
    lines = [json.dumps({"timestamp": number, "accuracy": 0.5}).encode() + b"\n" for number in range(300)]
    for count in range(1, len(lines) + 1):
        kept = b"".join(lines[max(0, count - 100) : count])
        for text in (kept[: len(kept) // 2], kept):
            (tmp_path / "hypertune.jsonl").write_bytes(text)
            heard += passed_on(reports).get("hypertune", b"")
    assert heard == b"".join(lines)


def test_a_replica_that_reports_nothing_has_no_lines(tmp_path: Path):
    assert passed_on(NewLines(tmp_path)) == {}


def test_the_entry_point_can_write_each_source():
    assert FILES == {"reports": "reports.jsonl", "hypertune": "hypertune.jsonl"}
    for source in FILES:
        (line,) = encode(source, b'{"step": 1}\n').decode().splitlines()
        assert decode(line) == (source, b'{"step": 1}\n')


def test_the_supervisor_keeps_all_reports_in_one_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The limit of logs, here 1 MB, doesn't apply. After a broken connection, the output comes again from its beginning."""
    monkeypatch.setenv("FOOTPLATE_LOG_MB", "1")
    lines = [f'{{"step": {step}, "value": 0.5}}\n' for step in range(100_000)]
    attempt = RayAttempt("http://127.0.0.1:1", "key", 1, tmp_path, 1, dict, lambda: None, begun=False)
    for some in (lines[:70_000], lines):
        attempt._take(Restart())
        attempt._take(Output(encode("reports", "".join(some).encode()).decode()))
    attempt.close()
    assert (tmp_path / "reports.jsonl").read_text() == "".join(lines)
    assert len(read_reports(tmp_path, "accuracy").events) == len(lines)
