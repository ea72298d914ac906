"""A job, and a list of jobs, in a notebook."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from footplate.jobs import job_html
from footplate.jobs.backends.local import machine
from footplate.jobs.home import Home
from footplate.jobs.operations import Jobs
from footplate.jobs.record import Job
from footplate.jobs.states import State
from footplate.jobs.store import open_store


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(
        "flowers",
        State.RUNNING,
        1e9,
        1e9,
        machine.host(),
        started=1e9 + 1,
        attempt=2,
        cause="<b>",
        plan={"job_dir": str(tmp_path)},
    )


def write(path: Path, text: str, age_s: float = 0) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    os.utime(path, (2e9 - age_s, 2e9 - age_s))


def test_it_shows_state_attempt_and_cause(job):
    shown = job._repr_html_()
    assert ">RUNNING<" in shown
    assert '>attempt</th><td style="text-align: left">2<' in shown
    assert "&lt;b&gt;" in shown
    assert "metric" not in shown


def test_the_metrics_are_the_last_values_of_the_newest_run(job, tmp_path):
    write(tmp_path / "metrics.csv", "step,loss\n1,9.0\n", age_s=10)
    write(
        tmp_path / "second" / "metrics.csv", "step,epoch,loss,<i>\n10,0,0.5123456789,\n20,1,,0.25\n30,1,0.4,\n40,2,0."
    )
    assert job_html.last_metrics(job) == {"step": "30", "epoch": "1", "loss": "0.4", "<i>": "0.25"}
    assert "&lt;i&gt;" in job._repr_html_()


def test_of_a_long_file_only_the_end_is_read(job, tmp_path, monkeypatch):
    monkeypatch.setattr(job_html, "_END_BYTES", 20)
    write(tmp_path / "metrics.csv", "step,early,late\n" + "1,1.0,\n" * 50 + "99,,0.125\n")
    assert job_html.last_metrics(job) == {"step": "99", "early": "1", "late": "0.125"}


def test_an_older_jobs_metrics_in_the_same_folder_are_not_shown(job, tmp_path):
    write(tmp_path / "metrics.csv", "step,loss\n1,9.0\n", age_s=2e9 - 1)
    assert job_html.last_metrics(job) == {}


def test_a_list_shows_the_newest_jobs(job, tmp_path):
    home = Home(tmp_path)
    jobs = Jobs(home, open_store(home))
    for number in range(22):
        jobs.store.add(replace(job, name=f"job_{number:02}", created=1e9 + number))
    shown = jobs._repr_html_()
    assert "job_21" in shown
    assert "job_02" in shown
    assert "job_01" not in shown
    assert "2 older jobs" in shown
