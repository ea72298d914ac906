"""The contract of loggers: one suite, run over each.

To add a logger, add it to `LOGGERS` with a function that reads the points of a metric back, in the order of their steps.
`Console` keeps no record, and `WandB` keeps it in W&B's own form. They have suites of their own.
"""

from __future__ import annotations

import contextlib
import csv
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from footplate import tracking
from footplate.core.errors import ConfigError
from footplate.tracking.base import Logger

Points = list[tuple[int, float]]


def csv_points(run_dir: Path, name: str) -> Points:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]


def jsonlines_points(run_dir: Path, name: str) -> Points:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], float(line["values"][name])) for line in lines if name in line.get("values", {})]


def tensorboard_points(run_dir: Path, name: str) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(name)]


def mlflow_points(run_dir: Path, name: str) -> Points:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("default").experiment_id])
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]


def trackio_points(run_dir: Path, name: str) -> Points:
    with contextlib.closing(sqlite3.connect(run_dir.parent / "trackio" / "default.db")) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    return [(step, json.loads(values)[name]) for step, values in rows if name in json.loads(values)]


LOGGERS: dict[str, Callable[[Path, str], Points]] = {
    "CSV": csv_points,
    "JSONLines": jsonlines_points,
    "MLflow": mlflow_points,
    "TensorBoard": tensorboard_points,
    "Trackio": trackio_points,
}
ENGINES = {"MLflow", "Trackio"}


class Case:
    """A kind of logger, and its record in a run's directory."""

    def __init__(self, name: str, run_dir: Path) -> None:
        self.kind: type[Logger] = getattr(tracking, name)
        self.run_dir = run_dir
        self._points = LOGGERS[name]

    def points(self, name: str) -> Points:
        return self._points(self.run_dir, name)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.engine if name in ENGINES else ()) for name in LOGGERS])
def case(request, run_dir, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(run_dir.parent / "trackio"))
    if request.param == "MLflow":
        request.getfixturevalue("database")
    return Case(request.param, run_dir)


def test_every_logger_is_in_the_suite():
    kinds = {name for name in tracking.__all__ if isinstance(getattr(tracking, name), type)}
    assert kinds - {"Logger", "Console", "WandB"} == set(LOGGERS), "add the logger to LOGGERS"


def test_metrics_are_read_back_with_their_steps(case):
    logger = case.kind()
    logger.setup(case.run_dir, {"lr": 0.5})
    logger.log_metrics({"loss": 0.5}, 10, 0)
    logger.log_metrics({"loss": 0.25, "val_loss": 1.0}, 20, 1)
    logger.log_metrics({"mine": 2.0})
    logger.finalize("success")
    assert case.points("loss") == [(10, 0.5), (20, 0.25)]
    assert case.points("val_loss") == [(20, 1.0)]
    # Without a step, a metric has the step of the last record.
    assert case.points("mine") == [(20, 2.0)]


def test_a_resumed_run_has_one_curve(case):
    logger = case.kind()
    logger.setup(case.run_dir, {})
    for step in (1, 2):
        logger.log_metrics({"loss": float(step)}, step, 0)
    logger.flush()
    state = json.loads(json.dumps(logger.state_dict()))
    logger.finalize("interrupted")

    resumed = case.kind()
    resumed.load_state_dict(state)
    resumed.setup(case.run_dir, {})
    for step in (3, 4):
        resumed.log_metrics({"loss": float(step)}, step, 0)
    resumed.finalize("success")
    assert case.points("loss") == [(step, float(step)) for step in (1, 2, 3, 4)]


def test_a_logger_that_is_set_up_again_adds_to_its_record(case):
    logger = case.kind()
    for name in ("first", "second"):
        logger.setup(case.run_dir, {})
        logger.log_metrics({name: 1.0}, 5, 0)
        logger.finalize("success")
    assert case.points("first") == case.points("second") == [(5, 1.0)]


def test_results_are_added_to_the_record_of_another_logger(case):
    trained = case.kind()
    trained.setup(case.run_dir, {})
    trained.log_metrics({"loss": 0.5}, 5, 0)
    trained.finalize("success")
    evaluated = case.kind()
    evaluated.append(case.run_dir, {})
    evaluated.log_metrics({"test_loss": 0.25}, 0, 0)
    evaluated.finalize("success")
    assert case.points("loss") == [(5, 0.5)]
    assert case.points("test_loss") == [(0, 0.25)]


def test_a_call_that_fails_before_setup_ends_without_an_error_or_a_record(case):
    logger = case.kind()
    logger.log_metrics({"loss": 0.5}, 1, 0)
    logger.flush()
    logger.finalize("failed")
    assert list(case.run_dir.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_named_before_training(case):
    case.run_dir.rmdir()
    case.run_dir.write_text("")
    title = getattr(case.kind, "title", case.kind.__name__)
    with pytest.raises(ConfigError, match=rf"{title} logger can't write .*{case.run_dir}.*default_root_dir"):
        case.kind().setup(case.run_dir, {})
