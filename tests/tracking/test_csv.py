"""CSV: a file that stays complete through new metrics, crashes and resumes."""

import csv
import json
import math
import resource
import signal
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.core.errors import ConfigError
from footplate.tracking import CSV
from footplate.tracking.csv import MetricsFile

metric = st.sampled_from(["loss", "val_loss", "lr", "a,b", 'quoted"', "línea"])
record = st.dictionaries(metric, st.floats(), max_size=4)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def values(rows, name):
    return [float(row[name]) if row.get(name) else None for row in rows]


def logged(run_dir, steps, **state):
    logger = CSV()
    if state:
        logger.load_state_dict(state)
    logger.setup(run_dir, {})
    for step in steps:
        logger.log_metrics({"loss": step / 10}, step, 0)
    return logger


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(st.lists(record, max_size=4), max_size=5))
def test_every_value_is_read_back_exactly_however_late_its_column_came(tmp_path_factory, batches):
    path = tmp_path_factory.mktemp("csv") / "metrics.csv"
    table = MetricsFile.create(path)
    step = 0
    expected = []
    for batch in batches:
        records = [{"step": step + i, "epoch": 0, **metrics} for i, metrics in enumerate(batch)]
        step += len(batch)
        expected += records
        table.append(records)
    rows = read(path)
    assert len(rows) == len(expected)
    for row, record in zip(rows, expected, strict=True):
        kept = {name: float(text) for name, text in row.items() if text}
        assert kept.keys() == record.keys()
        assert all(kept[name] == value or math.isnan(value) for name, value in record.items())


def test_metrics_and_parameters_lie_in_the_run_directory(run_dir):
    logger = CSV()
    logger.setup(run_dir, {"model": {"lr": 0.1}, "act": min})
    logger.log_metrics({"loss": 0.5}, 10, 0)
    logger.log_metrics({"val_loss": 0.25}, 10, 0)
    logger.finalize("success")
    assert (run_dir / "metrics.csv").read_text() == "step,epoch,loss,val_loss\n10,0,0.5,\n10,0,,0.25\n"
    assert json.loads((run_dir / "hparams.json").read_text()) == {
        "model": {"lr": 0.1},
        "act": "<built-in function min>",
    }


def test_a_module_logs_without_an_epoch_as_it_does_to_lightnings_loggers(run_dir):
    logger = CSV()
    logger.setup(run_dir, {})
    logger.log_metrics({"loss": 0.5}, 10, 1)
    logger.log_metrics({"mine": 1.0}, step=12)
    logger.log_metrics({"mine": 2.0})
    logger.finalize("success")
    assert (run_dir / "metrics.csv").read_text() == "step,epoch,loss,mine\n10,1,0.5,\n12,,,1.0\n12,,,2.0\n"


def test_a_resumed_curve_is_that_of_a_run_that_was_never_killed(run_dir):
    first = logged(run_dir, range(5))
    state = first.state_dict()
    for step in range(5, 9):  # after the checkpoint, before the kill
        first.log_metrics({"loss": 99.0, "other": 1.0}, step, 0)
    first._writer.flush(5)
    logged(run_dir, range(5, 12), **state).finalize("success")
    rows = read(run_dir / "metrics.csv")
    assert [int(row["step"]) for row in rows] == list(range(12))
    assert values(rows, "loss") == [step / 10 for step in range(12)]


def test_what_is_logged_before_a_checkpoint_survives_sigkill_right_after_it(run_dir):
    script = f"""
        import os, signal, pathlib
        from footplate.tracking import CSV
        logger = CSV()
        logger.setup(pathlib.Path({str(run_dir)!r}), {{}})
        for step in range(100):
            logger.log_metrics({{"loss": step / 10}}, step, 0)
        logger.flush()
        print(logger.state_dict())
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-u", "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.strip() == "{'rows': 100, 'step': 99}"
    assert len(read(run_dir / "metrics.csv")) == 100


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_last_line_torn_anywhere_is_dropped_on_resume(run_dir, cut):
    logger = logged(run_dir, range(3))
    state = logger.state_dict()
    logger.finalize("interrupted")
    path = run_dir / "metrics.csv"
    with path.open("ab") as file:
        file.write(b"3,0,0.333333"[:cut])
    logged(run_dir, [3], **{**state, "rows": 4, "step": 3}).finalize("success")
    assert values(read(path), "loss") == [0.0, 0.1, 0.2, 0.3]


def test_a_new_run_moves_older_files_aside(run_dir):
    for loss in (1.0, 2.0, 3.0):
        logger = CSV()
        logger.setup(run_dir, {"loss": loss})
        logger.log_metrics({"loss": loss}, 0, 0)
        logger.finalize("success")
    losses = {path.name: values(read(path), "loss") for path in run_dir.glob("*.csv")}
    assert losses == {"metrics-1.csv": [1.0], "metrics-2.csv": [2.0], "metrics.csv": [3.0]}
    assert json.loads((run_dir / "hparams-2.json").read_text()) == {"loss": 2.0}


def test_the_same_logger_set_up_again_continues_its_file(run_dir):
    logger = logged(run_dir, range(3))
    logger.finalize("success")
    logger.setup(run_dir, {})
    logger.log_metrics({"test_loss": 0.5}, 2, 0)
    logger.finalize("success")
    rows = read(run_dir / "metrics.csv")
    assert values(rows, "loss") == [0.0, 0.1, 0.2, None]
    assert values(rows, "test_loss") == [None, None, None, 0.5]


def test_a_third_run_of_a_logger_keeps_the_rows_of_a_longer_first_one(run_dir):
    logger = CSV()
    for steps in (5, 2, 1):
        logger.setup(run_dir, {})
        for step in range(steps):
            logger.log_metrics({"loss": step / 10}, step, 0)
        logger.finalize("success")
    assert [int(row["step"]) for row in read(run_dir / "metrics.csv")] == [0, 1, 2, 3, 4, 0, 1, 0]


def test_a_resumed_second_run_keeps_the_rows_of_a_longer_first_one(run_dir):
    logger = logged(run_dir, range(5))
    logger.finalize("success")
    logger.setup(run_dir, {})
    for step in range(3):
        logger.log_metrics({"loss": 1.0}, step, 0)
        if step == 1:
            state = logger.state_dict()
    logger.finalize("interrupted")
    logged(run_dir, [2], **state).finalize("success")
    assert [int(row["step"]) for row in read(run_dir / "metrics.csv")] == [0, 1, 2, 3, 4, 0, 1, 2]


def test_results_are_added_to_the_file_of_another_process_and_hyper_parameters_kept(run_dir):
    trained = CSV()
    trained.setup(run_dir, {"lr": 0.5})
    trained.log_metrics({"loss": 0.25}, 7, 0)
    trained.finalize("success")
    logger = CSV()
    logger.append(run_dir, {"lr": 0.1})
    logger.log_metrics({"test_loss": 0.5}, 0, 0)
    logger.finalize("success")
    assert (run_dir / "metrics.csv").read_text() == "step,epoch,loss,test_loss\n7,0,0.25,\n0,0,,0.5\n"
    assert json.loads((run_dir / "hparams.json").read_text()) == {"lr": 0.5}
    assert len(list(run_dir.iterdir())) == 2


def test_results_alone_make_a_file(run_dir):
    logger = CSV()
    logger.append(run_dir, {"lr": 0.1})
    logger.log_metrics({"test_loss": 0.5}, 0, 0)
    logger.finalize("success")
    assert (run_dir / "metrics.csv").read_text() == "step,epoch,test_loss\n0,0,0.5\n"
    assert json.loads((run_dir / "hparams.json").read_text()) == {"lr": 0.1}


def test_a_run_resumed_into_an_empty_directory_begins_a_file(run_dir):
    logged(run_dir, [7], rows=5, step=6).finalize("success")
    assert [row["step"] for row in read(run_dir / "metrics.csv")] == ["7"]


def test_a_full_disk_leaves_no_half_row_and_the_rows_come_later(tmp_path):
    path = tmp_path / "metrics.csv"
    table = MetricsFile.create(path)
    table.append([{"step": 0, "epoch": 0, "loss": 0.5}])
    before = path.read_text()
    rows = [{"step": step, "epoch": 0, "loss": 0.123456789} for step in range(1, 200)]

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            table.append(rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == before
    table.append(rows)
    assert [int(row["step"]) for row in read(path)] == list(range(200))


def test_a_directory_that_cannot_be_written_is_named_before_training(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"CSV logger can't write .*metrics\.csv.*default_root_dir"):
        CSV(blocked / "metrics.csv").setup(tmp_path, {})


def test_a_path_that_is_a_directory_is_refused_and_the_directory_stays_where_it_is(run_dir):
    with pytest.raises(ConfigError, match=r"CSV logger can't write .*: it is a directory.*file.*metrics\.csv"):
        CSV(run_dir).setup(run_dir, {})
    assert run_dir.is_dir()
    assert list(run_dir.parent.glob(f"{run_dir.name}-*")) == []


def test_a_path_of_ones_own(run_dir, tmp_path):
    logger = CSV(tmp_path / "elsewhere" / "curve.csv")
    logger.setup(run_dir, {})
    logger.log_metrics({"loss": 1.0}, 0, 0)
    logger.finalize("success")
    assert values(read(tmp_path / "elsewhere" / "curve.csv"), "loss") == [1.0]
    assert list(run_dir.iterdir()) == []
