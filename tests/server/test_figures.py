"""Recorded metrics of runs, as curves."""

from __future__ import annotations

import json
import time

from hypothesis import example, given
from hypothesis import strategies as st

from footplate.jobs.backends.local import machine
from footplate.jobs.home import Home
from footplate.jobs.record import Job
from footplate.jobs.redaction import Mask
from footplate.jobs.states import State
from footplate.server.figures import POINTS, figures, of_metrics, of_usage, thin

METRICS = """step,epoch,train_loss,lr,val_loss
10,0,2.5,0.1,
20,0,nan,0.1,
20,0,,,2.25
30,1,0.5,0.05,
4"""


def test_metrics_that_differ_in_their_stage_share_a_figure():
    loss, rate = of_metrics(METRICS)
    assert (loss.title, loss.unit, loss.x) == ("loss", "", "step")
    train, val = loss.series
    assert (train.name, train.x, train.y) == ("train_loss", [10, 20, 30], [2.5, None, 0.5])
    assert (val.name, val.x, val.y) == ("val_loss", [20], [2.25])
    assert (rate.title, rate.series[0].y) == ("lr", [0.1, 0.1, 0.05])


def test_of_several_runs_each_says_where_it_lies():
    assert [figure.title for figure in of_metrics(METRICS, "fold-1")] == ["loss · fold-1", "lr · fold-1"]


@given(st.text(alphabet='step,epoch\n"01.5-einfa', max_size=200))
def test_any_file_is_curves_or_none(text):
    for figure in of_metrics(text) + of_metrics(f"step,loss\n{text}"):
        assert all(len(series.x) == len(series.y) for series in figure.series)
    of_usage(f"time,cpus\n{text}", 0.0)


def test_where_there_are_no_curves_it_is_said_why(tmp_path):
    def notes(backend: str = "local", job_dir: str | None = None, host: str = machine.host()) -> tuple[str, str]:
        job = Job("my_job", State.RUNNING, 0.0, 0.0, host, backend, plan={"job_dir": job_dir})
        points = figures(job, Home(tmp_path), Mask())
        return points.training_note, points.devices_note

    assert notes() == (
        "The job has no job directory, so there are no metrics to find.",
        "There are no measurements of the devices yet. They begin a second after the processes.",
    )
    assert notes("vertex", "gs://bucket/out") == (
        "The job directory is gs://bucket/out. Metrics are read only from directories of this machine.",
        "Only devices of this machine are measured, and the job's processes run elsewhere.",
    )
    assert notes(host="another")[1] == "The job runs on another, and its figures are recorded there."


def test_use_of_devices_is_told_apart():
    text = "time,cpus,memory_bytes,gpu0_busy,gpu0_memory_bytes,gpu3_busy,gpu3_memory_bytes\n100.5,1.5,2048,0.5,4096,,\n"
    assert of_usage(text, 100.0) == {
        ("Processor", "cores"): ("cores", [(0.5, 1.5)]),
        ("Memory", "memory"): ("bytes", [(0.5, 2048.0)]),
        ("GPU use", "gpu0"): ("share", [(0.5, 0.5)]),
        ("GPU memory", "gpu0"): ("bytes", [(0.5, 4096.0)]),
        ("GPU use", "gpu3"): ("share", [(0.5, None)]),
        ("GPU memory", "gpu3"): ("bytes", [(0.5, None)]),
    }


@given(st.lists(st.none() | st.floats(-1e6, 1e6), max_size=2500))
@example([1.0, None, 2.0] * 800)
def test_a_long_curve_is_thinned_and_keeps_its_extremes(values):
    points = [(float(x), y) for x, y in enumerate(values)]
    kept = thin(points)
    assert len(kept) <= POINTS * 1.5
    assert kept == sorted(kept, key=lambda point: point[0])
    numbers = [y for y in values if y is not None]
    if numbers:
        assert min(numbers) in [y for _, y in kept]
        assert max(numbers) in [y for _, y in kept]


def test_the_record_of_a_training_becomes_areas_rates_and_advice(tmp_path):
    now = time.time() - 100.0
    parts = {"input": 0.5, "forward": 1.0, "checkpoint": 0.5}
    window = {"kind": "window", "wall_s": 2.0, "seconds": parts, "samples": 64, "tokens": None, "flops": 4e9}
    rows = [
        {"kind": "start", "time": now, "step": 0, "total_steps": 40},
        {**window, "time": now + 2.0, "step": 10},
        {**window, "time": now + 90.0, "step": 20},
        {"kind": "start", "time": now + 95.0, "step": 20, "total_steps": 40},
        {**window, "time": now + 99.0, "step": 30},
        {"kind": "advice", "time": now + 99.0, "rule": "input", "text": "set https://me:my-secret@host"},
    ]
    (tmp_path / "monitor.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = Job("my_job", State.RUNNING, now, now, machine.host(), "local", plan={"job_dir": str(tmp_path)})
    points = figures(job, Home(tmp_path), Mask())
    assert points.time_note == ""
    areas, samples, flops = points.time
    assert (areas.title, areas.kind, areas.unit) == ("Time by cause", "stacked", "share")
    assert [(series.name, series.total) for series in areas.series] == [
        ("forward", 3.0), ("waiting for input", 1.5), ("checkpoints", 1.5),
    ]  # fmt: skip
    assert [round(x) for x in areas.series[0].x] == [0, 2, 90, 97, 97, 99]
    assert areas.series[0].y == [0.5, 0.5, 0.5, None, 0.5, 0.5]
    assert (samples.title, samples.series[0].y[0]) == ("Samples per second", 32.0)
    assert (flops.title, flops.series[0].y[0]) == ("FLOPs per second", 2e9)
    assert points.advice == ["set https://me:[hidden]@host"]
    assert points.remaining_seconds is not None
    assert 0.0 <= points.remaining_seconds <= 2.0
    queued = Job("my_job", State.QUEUED, now, now, machine.host(), "local", plan={"job_dir": str(tmp_path)})
    assert figures(queued, Home(tmp_path), Mask()).remaining_seconds is None


def test_without_a_record_one_sentence_explains_it(tmp_path):
    job = Job("my_job", State.RUNNING, 0.0, 0.0, machine.host(), "local", plan={"job_dir": str(tmp_path)})
    points = figures(job, Home(tmp_path), Mask())
    assert (points.time, points.advice) == ([], [])
    assert points.time_note == (
        f"There is no monitor.jsonl of this job in {tmp_path} yet. A Trainer writes it about once a second while it trains."
    )
