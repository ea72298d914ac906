"""JSON lines: a file that programs read, complete through crashes and resumes."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import footplate as fp
from footplate.core.errors import ConfigError
from footplate.tracking import JSONLines
from footplate.tracking.jsonlines import LinesFile
from tracking.attempts import killed_attempt


def read(path):
    # A strict reader: NaN and Infinity are no JSON.
    def refuse(constant):
        raise ValueError(constant)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def points(path, name="loss"):
    return [(row["step"], row["values"][name]) for row in read(path) if name in row.get("values", {})]


def logged(run_dir, steps, state=None):
    logger = JSONLines()
    if state:
        logger.load_state_dict(state)
    logger.setup(run_dir, {"lr": 0.1})
    for step in steps:
        logger.log_metrics({"loss": step / 10}, step, 0)
    return logger


@settings(max_examples=40, deadline=None)
@given(values=st.dictionaries(st.text(max_size=6), st.floats(), max_size=5))
def test_every_value_is_read_back_exactly(tmp_path_factory, values):
    run_dir = tmp_path_factory.mktemp("run")
    logger = JSONLines()
    logger.setup(run_dir, {})
    logger.log_metrics(values, 3, 1)
    logger.finalize("success")
    (row,) = read(run_dir / "metrics.jsonl")
    assert (row["step"], row["epoch"]) == (3, 1)
    assert row["values"].keys() == values.keys()
    for name, value in values.items():
        restored = float(row["values"][name])
        assert restored == value or (math.isnan(restored) and math.isnan(value))


def test_rows_and_hyper_parameters_are_files(run_dir):
    logged(run_dir, range(3)).finalize("success")
    assert points(run_dir / "metrics.jsonl") == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert json.loads((run_dir / "metrics-hparams.json").read_text()) == {"lr": 0.1}


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(run_dir):
    first = logged(run_dir, range(10))
    first.flush()
    state = first.state_dict()
    for step in range(10, 15):
        first.log_metrics({"loss": 99.0}, step, 0)
    first.finalize("interrupted")
    logged(run_dir, range(10, 20), state).finalize("success")
    assert points(run_dir / "metrics.jsonl") == [(step, step / 10) for step in range(20)]


def test_a_run_killed_three_times_has_the_curve_of_an_uninterrupted_run(run_dir):
    state = None
    for first in (0, 10, 20):
        state = killed_attempt("JSONLines", run_dir, state, range(first, first + 15), checkpoint_at=first + 9)
    logged(run_dir, range(30, 40), state).finalize("success")
    assert points(run_dir / "metrics.jsonl") == [(step, step / 10) for step in range(40)]


def test_rows_before_the_checkpoint_that_never_reached_the_disk_do_not_keep_later_ones(tmp_path):
    """A flush that took too long: the checkpoint counts a row that the file got only after it was truncated."""
    file = LinesFile.create(tmp_path / "m.jsonl")
    file.append([{"step": step} for step in (1, 2, 3, 4)])
    assert LinesFile.reopen(file.path, rows=4, step=2).rows == 2
    assert read(file.path) == [{"step": 1}, {"step": 2}]


def test_a_torn_line_is_dropped_and_results_are_added(run_dir):
    logged(run_dir, range(3)).finalize("success")
    path = run_dir / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 3, "val')
    other = JSONLines()
    other.append(run_dir, {"lr": 9})
    other.log_metrics({"test_loss": 0.5}, 2, 0)
    other.finalize("success")
    assert points(path) == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert points(path, "test_loss") == [(2, 0.5)]
    assert json.loads((run_dir / "metrics-hparams.json").read_text()) == {"lr": 0.1}


def test_a_new_run_moves_older_files_aside(run_dir):
    for step in (1, 2):
        logger = logged(run_dir, [step])
        logger.log_image("x", np.zeros((2, 2)), step)
        logger.finalize("success")
    assert points(run_dir / "metrics-1.jsonl") == [(1, 0.1)]
    assert points(run_dir / "metrics.jsonl") == [(2, 0.2)]
    assert (run_dir / "media-1" / "image" / "x" / "1.png").exists()
    assert (run_dir / "media" / "image" / "x" / "2.png").exists()


def test_csv_and_json_lines_do_not_disturb_each_other(run_dir):
    loggers = [fp.CSV(), fp.JSONLines()]
    for logger in loggers:
        logger.setup(run_dir, {"lr": 0.1})
    for logger in loggers:
        logger.finalize("success")
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "hparams.json", "metrics-hparams.json", "metrics.csv", "metrics.jsonl",
    ]  # fmt: skip


def test_a_directory_that_cannot_be_written_is_named_before_training(run_dir):
    run_dir.rmdir()
    run_dir.write_text("")
    with pytest.raises(ConfigError, match=r"JSON lines logger can't write .*metrics\.jsonl"):
        JSONLines().setup(run_dir, {})
