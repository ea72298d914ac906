"""Readers of a run's files: damaged, growing and missing ones too."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from footplate.core.errors import ConfigError
from footplate.reporting.environment import command
from footplate.reporting.metrics_file import read_metrics
from footplate.reporting.monitor_log import MonitorLog, merged, read_monitor, total_seconds
from footplate.reporting.run_record import find_status, read_run
from footplate.reporting.thinning import thin
from footplate.training.lock import is_held, only_writer
from reporting.runs import full_run, monitor_rows, write_hparams, write_metrics, write_monitor


def test_metrics_are_series_without_the_empty_cells(tmp_path):
    write_metrics(tmp_path)
    metrics = read_metrics(tmp_path)
    assert metrics.series["val_loss"].steps.tolist() == [100, 200, 300, 400]
    assert len(metrics.series["train_loss"].values) == 40
    assert (metrics.rows, metrics.faulty) == (44, 0)


def test_damaged_lines_are_counted_and_the_others_are_read(tmp_path):
    lines = [
        "step,epoch,loss",
        "1,0,0.5",
        "2,0",
        '3,0,"',
        "four,0,0.1",
        "5,0,much",
        "\x00\x00,,",
        "7,0,0.25",
        "8,0,0.1",
    ]
    (tmp_path / "metrics.csv").write_text("\n".join(lines))  # the last line has no end: it is half written
    metrics = read_metrics(tmp_path)
    assert metrics.series["loss"].steps.tolist() == [1, 7]
    assert metrics.faulty == 6


def test_values_that_are_not_finite_are_kept(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,epoch,loss\n1,0,0.5\n2,0,nan\n3,0,inf\n4,0,0.25\n")
    series = read_metrics(tmp_path).series["loss"]
    assert math.isnan(series.values[1])
    assert series.values[2] == math.inf
    assert (series.first_not_finite, series.finite.tolist(), series.last) == (2, [0.5, 0.25], 0.25)


def test_metrics_of_json_lines_are_read_without_their_texts(tmp_path):
    rows = [{"step": 1, "epoch": 0, "loss": 0.5}, {"step": 2, "text": "hello", "image": {"path": "a.png"}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{half")
    metrics = read_metrics(tmp_path)
    assert (list(metrics.series), metrics.rows, metrics.faulty) == (["loss"], 2, 1)


@pytest.mark.parametrize("text", ["", "step,epoch\n", "\n\n", "what,is,this\n1,2,3\n"])
def test_a_file_without_metrics_has_none(tmp_path, text):
    (tmp_path / "metrics.csv").write_text(text)
    assert read_metrics(tmp_path).series == {}


def test_attempts_of_a_monitor_are_divided_at_each_start(tmp_path):
    full_run(tmp_path / "run")
    log = read_monitor(tmp_path / "run")
    first, second = log.attempts
    assert (first.start.step, first.step, first.status) == (0, 200, None)
    assert (second.start.step, second.step, second.status) == (150, 400, "finished")
    assert log.steps_trained_again == 50
    assert len(second.advice) == 1
    assert second.comparisons[-1].ranks[1].own_s == 13.0


def test_a_monitor_is_read_tolerantly(tmp_path):
    rows = [json.dumps(row) for row in monitor_rows(20)]
    damaged = [
        *rows[:2],
        '{"kind": "window", "ti',
        "[1, 2]",
        '{"kind": "new kind", "step": "x"}',
        *rows[2:],
        '{"kind": "wi',
    ]
    (tmp_path / "monitor.jsonl").write_text("\n".join(damaged))
    log = read_monitor(tmp_path)
    assert len(log.windows) == 2
    assert log.faulty == 2
    strange = {"kind": "window", "seconds": {"input": "much", "step": 1.0}, "wall_s": None, "samples": True, "later": 1}
    write_monitor(tmp_path, [strange])
    (window,) = read_monitor(tmp_path).windows
    assert (window.seconds, window.wall_s, window.samples) == ({"step": 1.0}, 0.0, None)


def test_merged_windows_have_the_same_sums(tmp_path):
    write_monitor(tmp_path, monitor_rows(400))
    windows = read_monitor(tmp_path).windows
    few = merged(windows, 7)
    assert len(few) <= 7
    assert total_seconds(few) == pytest.approx(total_seconds(windows))
    assert sum(window.samples for window in few) == sum(window.samples for window in windows)
    assert few[-1].step == 400


@given(
    hnp.arrays(np.float64, st.integers(0, 400), elements=st.floats(allow_nan=True, allow_infinity=True)),
    st.integers(1, 30),
)
def test_a_thinned_series_keeps_its_ends_its_least_and_its_greatest_value(values, bins):
    thinned = thin(values, bins)
    assert len(thinned.index) <= 2 * bins + 2
    kept, finite = values[thinned.index], values[np.isfinite(values)]
    if len(values):
        assert thinned.index[0] == 0
        assert thinned.index[-1] == len(values) - 1
    if len(finite):
        assert np.nanmin(np.where(np.isfinite(kept), kept, np.nan)) == finite.min()
        assert np.nanmax(np.where(np.isfinite(kept), kept, np.nan)) == finite.max()
        assert np.nanmin(thinned.means) >= finite.min()
        assert np.nanmax(thinned.means) <= finite.max()
    assert (thinned.of == 0) == (len(values) <= 2 * bins)


def test_means_of_the_largest_floats_do_not_overflow():
    values = np.full(490, np.finfo(np.float64).max)
    assert thin(values, bins=10).means.tolist() == [np.finfo(np.float64).max] * 10


def test_each_bin_of_a_thinned_series_keeps_its_spikes():
    values = np.zeros(200_000)
    values[[123, 77_777, 150_001]] = [5, -7, 9]
    thinned = thin(values)
    assert len(thinned.index) < 2100
    assert {123, 77_777, 150_001} <= set(thinned.index.tolist())
    assert thinned.of == 200_000


@pytest.mark.parametrize("status", ["finished", "interrupted", "failed"])
def test_the_status_is_what_the_last_attempt_says(tmp_path, status):
    write_monitor(tmp_path, monitor_rows(20, status=status))
    assert read_run(tmp_path).status == status


def test_a_run_whose_process_is_gone_without_a_word_was_killed(tmp_path):
    write_monitor(tmp_path, monitor_rows(20, status=None))
    assert read_run(tmp_path).status == "killed"
    assert find_status(MonitorLog(), None) == "ended"


def test_a_run_whose_lock_is_held_goes_on(tmp_path):
    write_monitor(tmp_path, monitor_rows(20, status=None))
    with only_writer(tmp_path):
        assert is_held(tmp_path)
        assert read_run(tmp_path).status == "running"
    assert is_held(tmp_path) is None
    (tmp_path / ".lock").touch()
    assert is_held(tmp_path) is False


def test_a_directory_without_a_run_is_an_error_that_says_what_is_expected(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run\. Expected one of metrics\.csv"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="there is no such directory"):
        read_run(tmp_path / "nowhere")


def test_damaged_json_files_leave_a_run_readable(tmp_path):
    write_metrics(tmp_path)
    for name in ("hparams.json", "plan.json", "environment.json", "alerts.jsonl", "summary.json"):
        (tmp_path / name).write_text("{not json")
    run = read_run(tmp_path)
    assert (run.hparams, run.plan, run.environment, run.alerts) == ({}, None, {}, [])


def test_a_run_of_hyper_parameters_only_is_a_run(tmp_path):
    write_hparams(tmp_path, lr=0.1, model={"width": 3})
    assert read_run(tmp_path).hparams == {"lr": 0.1, "model/width": 3}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/usr/bin/python", "train.py", "--lr", "0.1"], "python train.py --lr 0.1"),
        (["python", "--api-key=abc"], "python --api-key=HIDDEN"),
        (["python", "--token", "abc", "--lr", "1"], "python --token HIDDEN --lr 1"),
        (["python", "https://me:secret@tracker.example/x"], "python https://tracker.example/x"),
        (["python", "a b"], "python 'a b'"),
    ],
)
def test_a_recorded_command_has_no_secrets(words, shown):
    assert command(words) == shown


def test_hangs_of_the_job_of_a_run_are_read_from_its_attempts(tmp_path, monkeypatch):
    monkeypatch.setenv("FOOTPLATE_HOME", str(tmp_path / "home"))
    run, folder = tmp_path / "run", tmp_path / "home" / "jobs" / "flowers_1"
    ours, another = "flowers_1-1764060000000000", "flowers_1-1764070000000000"
    for attempt in (1, 2):
        (folder / f"attempt-{attempt}").mkdir(parents=True)
        (folder / f"attempt-{attempt}" / "hang-1.txt").write_text(f"rank {attempt} is late\n\nstacks\n")
    (folder / ours).touch()
    run.mkdir()
    (run / "hang-1.txt").write_text("rank 0 is late\n")

    def hangs_of(*jobs):
        rows = [{**monitor_rows()[0], "job": job} for job in jobs]
        (run / "monitor.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [(hang.name, hang.text.splitlines()[0]) for hang in read_run(run).hangs]

    own = [("hang-1.txt", "rank 0 is late")]
    assert hangs_of(ours, ours) == [
        *own,
        ("attempt-1/hang-1.txt", "rank 1 is late"),
        ("attempt-2/hang-1.txt", "rank 2 is late"),
    ]
    # In the job, which doesn't know its home.
    with monkeypatch.context() as in_the_job:
        in_the_job.setenv("FOOTPLATE_HOME", str(tmp_path / "another"))
        in_the_job.setenv("FOOTPLATE_JOB_ID", ours)
        in_the_job.setenv("FOOTPLATE_HANGS_DIR", str(folder / "attempt-2"))
        assert [name for name, _ in hangs_of(ours)] == ["hang-1.txt", "attempt-1/hang-1.txt", "attempt-2/hang-1.txt"]
        assert hangs_of(another) == own
    # A later job of the same name, and what a file of somebody else may say.
    for job in (another, None, 7, "../../jobs/flowers_1-1764060000000000", "/etc-1", "", "flowers_1"):
        assert hangs_of(job) == own


def test_hangs_of_a_job_that_this_machine_does_not_have_are_none_and_no_home_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("FOOTPLATE_HOME", str(tmp_path / "home"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "monitor.jsonl").write_text(json.dumps({**monitor_rows()[0], "job": "flowers_1-1764060000000000"}) + "\n")
    assert list(read_run(run).hangs) == []
    assert not (tmp_path / "home").exists()


def test_a_bucket_is_no_directory_of_a_run():
    with pytest.raises(ConfigError, match=r"s3://lake/run: the directory of a run is on a disk\. Give that directory"):
        read_run("s3://lake/run")
