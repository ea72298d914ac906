"""Entries of Cloud Logging become files: no line lost, none twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.jobs.backends.vertex.attempt_record import AttemptRecord, RecordFile
from footplate.jobs.backends.vertex.client import Client
from footplate.jobs.backends.vertex.logs import WINDOW_S, Output
from jobs.backends.vertex_attempt import created


def entry(number: int, at: int, task: str = "workerpool0-0") -> dict:
    return {"insertId": str(number), "timestamp": f"2026-01-01T00:{at // 60:02d}:{at % 60:02d}.{number:09d}Z",
            "resource": {"labels": {"task_name": task}}, "jsonPayload": {"message": f"line {number} €"}}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    overlap=st.integers(0, 4),
    kills=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=4),
)
def test_killed_at_any_byte_no_line_is_lost_and_none_is_written_twice(tmp_path_factory, counts, overlap, kills):
    """Each page has new entries and some known ones. A kill truncates a file after some bytes of a page."""
    folder = tmp_path_factory.mktemp("attempt")
    lines = [entry(number, number, ("workerpool0-0", "workerpool1-0")[number % 2]) for number in range(sum(counts))]
    kills_at = dict(kills)
    output, seen = Output(RecordFile(folder)), 0
    for page, count in enumerate(counts):
        seen += count
        before = {path.name: path.stat().st_size for path in folder.glob("*.log")}
        output.add(lines[max(0, seen - count - overlap) : seen])
        if page in kills_at:
            output.close()
            for path in folder.glob("*.log"):  # as if the supervisor had died while it wrote
                written = path.stat().st_size - before.get(path.name, 0)
                with path.open("r+b") as file:
                    file.truncate(before.get(path.name, 0) + min(written, kills_at[page]))
            output = Output(RecordFile(folder))
    output.close()
    for name, first in (("master-0.log", 0), ("worker-0.log", 1)):
        wanted = "".join(f"line {number} €\n" for number in range(first, len(lines), 2))
        assert ((folder / name).read_text() if (folder / name).exists() else "") == wanted


def test_an_entry_that_arrives_a_little_late_is_kept_and_what_is_old_is_forgotten(tmp_path):
    output = Output(RecordFile(tmp_path))
    assert output.add([entry(1, 0), entry(3, 30)]) == 2
    assert output.add([entry(2, 10), entry(3, 30)]) == 1
    assert output.add([entry(4, 40 + WINDOW_S)]) == 1
    assert (tmp_path / "master-0.log").read_text() == "line 1 €\nline 3 €\nline 2 €\nline 4 €\n"
    assert len(AttemptRecord.read(tmp_path).known) == 1


def test_reports_of_a_trial_go_into_its_files_and_not_into_the_output(tmp_path):
    """A program may have written a part of a line before. Only the master's reports count."""
    said = [
        ("workerpool0-0", 'footplate-trial reports {"step": 2, "value": 0.5}'),
        ("workerpool0-0", ' 42%|####footplate-trial hypertune {"accuracy": "0.7"}'),
        ("workerpool0-0", "footplate-trial of another kind {}"),
        ("workerpool1-0", 'footplate-trial reports {"step": 3, "value": 0.6}'),
    ]
    output = Output(RecordFile(tmp_path))
    entries = [entry(number, number, task) for number, (task, _) in enumerate(said)]
    for each, (_, text) in zip(entries, said, strict=True):
        each["jsonPayload"] = {"message": text}
    assert output.add(entries) == 4
    output.close()
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.suffix in (".log", ".jsonl")} == {
        "reports.jsonl": '{"step": 2, "value": 0.5}\n',
        "hypertune.jsonl": '{"accuracy": "0.7"}\n',
        "master-0.log": " 42%|####\nfootplate-trial of another kind {}\n",
        "worker-0.log": 'footplate-trial reports {"step": 3, "value": 0.6}\n',
    }


def test_a_page_is_no_end_of_a_log(cloud, tmp_path):
    cloud.page = 3
    run = created(cloud)
    for number in range(20):
        cloud.say(run, "workerpool0-0", f"line {number}")
    output = Output(RecordFile(tmp_path))
    assert output.fetch(Client("my-project", "us-central1"), run.resource["name"]) == 20
    assert output.fetch(Client("my-project", "us-central1"), run.resource["name"]) == 0
    assert (tmp_path / "master-0.log").read_text() == "".join(f"line {number}\n" for number in range(20))


def test_entries_that_cannot_be_noted_are_new_the_next_time(tmp_path):
    output = Output(RecordFile(tmp_path))
    assert output.add([entry(1, 0)]) == 1
    (tmp_path / "vertex.json.part").mkdir()  # has the effect of a full disk
    with pytest.raises(OSError, match="directory"):
        output.add([entry(2, 1)])
    (tmp_path / "vertex.json.part").rmdir()
    assert output.add([entry(1, 0), entry(2, 1)]) == 1
    assert (tmp_path / "master-0.log").read_text() == "line 1 €\nline 2 €\n"


def test_lines_that_cannot_be_written_are_written_with_the_next_ones(tmp_path):
    output = Output(RecordFile(tmp_path))
    (tmp_path / "master-0.log").symlink_to(tmp_path / "a disk that is away" / "log")
    with pytest.raises(FileNotFoundError):
        output.add([entry(1, 0)])
    (tmp_path / "master-0.log").unlink()
    assert output.add([entry(2, 1)]) == 1
    assert (tmp_path / "master-0.log").read_text() == "line 1 €\nline 2 €\n"
