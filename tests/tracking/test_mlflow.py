"""MLflow in its embedded SQLite store: the contents of a run, and the continuation of a killed one."""

import math
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from footplate import __version__
from footplate.core.errors import ConfigError, MissingExtra
from footplate.tracking import MLflow
from footplate.tracking.mlflow import deliver_pending
from tracking.attempts import killed_attempt

pytestmark = pytest.mark.engine


def only_run(client, experiment="default"):
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return run


def points(client, run_id, name):
    """Points in the order of arrival."""
    return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]


def test_parameters_metrics_environment_and_status_are_kept(run_dir, database):
    logger = MLflow(experiment="flowers", run_name="first", tags={"team": "garden"})
    hparams = {"model": {"lr": 0.1, "sizes": [1, 2]}, "data": {"uri": "s3://me:secret@lake/x"}, "long": "y" * 9000}
    logger.setup(run_dir, hparams)
    for step in range(3):
        logger.log_metrics({"loss": step / 2, "odd name: #1": 1.0}, step, 0)
    logger.log_metrics({"loss": math.nan, "top": math.inf}, 3, 1)
    run_id = logger.run_id
    logger.finalize("success")

    run = only_run(database, "flowers")
    assert run.info.run_id == run_id == logger.run_id
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params == {
        "model/lr": "0.1", "model/sizes": "[1, 2]", "data/uri": "s3://lake/x", "long": "y" * 6000,
    }  # fmt: skip
    assert points(database, run_id, "loss")[:3] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert math.isnan(points(database, run_id, "loss")[3][1])
    assert points(database, run_id, "top")[0][0] == 3
    assert [value for _, value in points(database, run_id, "epoch")] == [0, 0, 0, 1]
    assert len(points(database, run_id, "odd name: _1")) == 3
    assert run.data.tags["team"] == "garden"
    assert run.data.tags["footplate"] == __version__
    assert run.data.tags["torch"] == torch.__version__
    paths = {artifact.path for artifact in database.list_artifacts(run_id, "environment")}
    assert paths == {"environment/requirements.txt", "environment/machine.json"}
    requirements = database.download_artifacts(run_id, "environment/requirements.txt")
    assert f"torch=={torch.__version__}\n" in open(requirements).read()  # noqa: PTH123, SIM115
    assert run.info.artifact_uri.startswith((run_dir.parent / "mlartifacts").as_uri())
    assert sorted(path.name for path in run_dir.iterdir()) == [".mlflow.lock", "mlflow.json"]


def test_the_training_process_never_imports_mlflow(run_dir, database):
    script = f"""
        import pathlib, random, sys
        from footplate.tracking import MLflow
        random.seed(1)
        before = random.getstate()
        logger = MLflow()
        logger.setup(pathlib.Path({str(run_dir)!r}), {{}})
        logger.log_metrics({{"loss": 1.0}}, 0, 0)
        assert logger.run_id
        logger.finalize("success")
        assert "mlflow" not in sys.modules
        assert random.getstate() == before
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert only_run(database).info.status == "FINISHED"


@pytest.mark.parametrize(
    ("policy", "kept"),
    [("none", set()), ("best", {"step-2"}), ("all", {"step-1", "step-2", "step-3.pt"})],
)
def test_checkpoints_are_kept_by_policy(run_dir, database, policy, kept):
    logger = MLflow(log_checkpoints=policy)
    logger.setup(run_dir, {})
    for name, aliases in (("step-1", ("best", "last")), ("step-2", ("best",)), ("step-3.pt", ("last",))):
        path = run_dir / "checkpoints" / name
        if path.suffix:
            path.write_text("weights")
        else:
            path.mkdir(parents=True)
            (path / "weights").write_text("weights")
        logger.log_checkpoint(path, aliases)
    logger.finalize("success")
    assert {artifact.path for artifact in database.list_artifacts(logger.run_id, "checkpoints")} == {
        f"checkpoints/{name}" for name in kept
    }


def test_a_checkpoint_deleted_before_it_was_sent_is_mentioned_and_the_rest_arrives(run_dir, database, caplog):
    logger = MLflow(log_checkpoints="all")
    logger.setup(run_dir, {})
    logger.log_checkpoint(run_dir / "gone.pt", ("last",))
    logger.log_metrics({"loss": 1.0}, 0, 0)
    logger.finalize("success")
    assert "MLflow refused checkpoint" in caplog.text
    assert "gone.pt" in caplog.text
    assert points(database, logger.run_id, "loss") == [(0, 1.0)]


@pytest.mark.slow
def test_a_run_killed_with_sigkill_is_continued_without_gap_or_repetition(run_dir, database):
    state = killed_attempt("MLflow", run_dir, None, range(60), checkpoint_at=39)
    logger = MLflow()
    logger.load_state_dict(state)
    logger.setup(run_dir, {"epochs": 3, "new": 1})
    for step in range(40, 80):
        logger.log_metrics({"loss": step / 10}, step, 0)
    logger.finalize("success")

    run = only_run(database)
    assert run.info.run_id == state["run_id"] == logger.run_id
    assert run.info.status == "FINISHED"
    assert points(database, run.info.run_id, "loss") == [(step, step / 10) for step in range(80)]
    assert run.data.params == {"epochs": "2", "new": "1"}
    assert run.data.tags["resumed/epochs"] == "3"


def test_a_run_killed_with_sigkill_and_never_continued_is_shown_as_killed(run_dir, database):
    killed_attempt("MLflow", run_dir, None, range(10), checkpoint_at=5)
    assert deliver_pending(run_dir)  # waits for the uploader that the killed process left
    run = only_run(database)
    assert run.info.status == "KILLED"
    assert len(points(database, run.info.run_id, "loss")) == 10


def test_the_same_logger_set_up_again_continues_its_run(run_dir, database):
    logger = MLflow()
    for value in (1.0, 2.0):
        logger.setup(run_dir, {})
        logger.log_metrics({"loss": value}, 5, 0)
        logger.finalize("success")
    run = only_run(database)
    assert points(database, run.info.run_id, "loss") == [(5, 1.0), (5, 2.0)]


def test_the_runs_of_trials_are_children_of_one_run_of_their_tuning(run_dir, database, monkeypatch):
    monkeypatch.setenv("FOOTPLATE_TRIAL_TUNING", "rates-17")
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "rates")
    loggers = [MLflow(), MLflow()]
    # Both are open at once, as in parallel trials.
    for number, logger in enumerate(loggers, 1):
        monkeypatch.setenv("CLOUD_ML_TRIAL_ID", str(number))
        directory = run_dir.parent / str(number)
        directory.mkdir()
        logger.setup(directory, {"lr": number})
        logger.log_metrics({"loss": float(number)}, 1, 0)
    for logger in loggers:
        logger.finalize("success")
    runs = database.search_runs([database.get_experiment_by_name("default").experiment_id])
    (parent,) = (run for run in runs if run.info.run_name == "rates")
    assert parent.info.status == "FINISHED"
    children = [run for run in runs if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert sorted(run.data.tags["footplate.trial"] for run in children) == ["1", "2"]


@pytest.mark.slow
def test_results_are_added_to_the_run_of_another_process(run_dir, database):
    trained = MLflow()
    trained.setup(run_dir, {"lr": 0.5})
    trained.log_metrics({"val_loss": 1.0}, 5, 0)
    trained.finalize("success")
    logger = MLflow()
    logger.append(run_dir, {"lr": 0.1})
    logger.log_metrics({"val_loss": 2.0}, 5, 0)
    logger.finalize("success")
    run = only_run(database)
    assert run.info.run_id == logger.run_id
    assert points(database, run.info.run_id, "val_loss") == [(5, 1.0), (5, 2.0)]
    assert run.data.params == {"lr": "0.5"}
    assert not [name for name in run.data.tags if name.startswith("resumed/")]


def test_a_run_deleted_from_the_tracker_is_continued_as_a_new_one(run_dir, database):
    logger = MLflow()
    logger.setup(run_dir, {})
    first = logger.run_id
    logger.finalize("interrupted")
    assert only_run(database).info.status == "KILLED"
    database.delete_run(first)
    state = logger.state_dict()
    again = MLflow()
    again.load_state_dict(state)
    again.setup(run_dir, {})
    again.log_metrics({"loss": 1.0}, 1, 0)
    again.finalize("success")
    assert only_run(database).info.run_id == again.run_id != first


def test_an_uploader_that_is_killed_is_replaced_at_the_end_at_the_latest(run_dir, database):
    logger = MLflow()
    logger.setup(run_dir, {})
    run_id = logger.run_id
    uploader = logger._attempt._uploader._process
    uploader.kill()
    uploader.wait()
    logger.log_metrics({"loss": 1.0}, 0, 0)
    logger.finalize("success")
    assert points(database, run_id, "loss") == [(0, 1.0)]
    assert only_run(database).info.status == "FINISHED"


def test_data_loading_workers_that_live_on_do_not_delay_the_end(run_dir, database):
    """They inherit the pipe to the uploader, so its end of input never comes."""
    logger = MLflow()
    logger.setup(run_dir, {})
    assert logger.run_id
    worker = os.fork()
    if worker == 0:
        signal.pause()
    try:
        logger.finalize("success")
        assert only_run(database).info.status == "FINISHED"
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"log_checkpoints": "some"}, r"log_checkpoints='some': expected"),
        ({"experiment": " "}, r"experiment=' ': expected a name"),
        ({"register_as": "flowers", "log_model": False}, r'register_as="flowers" needs the model'),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        MLflow(**arguments)


def test_without_mlflow_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtra, match=r'Logging to MLflow needs mlflow.*pip install "footplate\[mlflow\]"'):
        MLflow()
