"""`footplate tune`: search spaces, the code of the submission, and a tuning from nothing to its best trial."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from jobs.conftest import a_bench

from footplate import checkpoint
from footplate.cli.tune_code import code_package, fit_arguments, trial_imports
from footplate.cli.tune_space import parameter_spec
from footplate.core.errors import ConfigError
from footplate.training import job


@pytest.fixture
def trial_flags(net, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Flags of trials, whose directories the tuning chooses. The test has a home of jobs, and works in the project."""
    with a_bench(tmp_path, monkeypatch):
        monkeypatch.chdir(project)
        yield [word for word in map(str, net) if not word.startswith("--trainer.default_root_dir")]


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("a.b=1..8", {"type": "INTEGER", "minValue": 1.0, "maxValue": 8.0, "scaleType": "UNIT_LINEAR_SCALE"}),
        ("a.b=0.0..0.5", {"type": "DOUBLE", "minValue": 0.0, "maxValue": 0.5, "scaleType": "UNIT_LINEAR_SCALE"}),
        ("a.b=-1..0.5", {"type": "DOUBLE", "minValue": -1.0, "maxValue": 0.5, "scaleType": "UNIT_LINEAR_SCALE"}),
        ("--a.b=log:1e-5..1", {"type": "DOUBLE", "minValue": 1e-5, "maxValue": 1.0, "scaleType": "UNIT_LOG_SCALE"}),
        ("a.b=log:8..512", {"type": "INTEGER", "minValue": 8.0, "maxValue": 512.0, "scaleType": "UNIT_LOG_SCALE"}),
        (
            "a.b=reverse-log:.5..0.999",
            {"type": "DOUBLE", "minValue": 0.5, "maxValue": 0.999, "scaleType": "UNIT_REVERSE_LOG_SCALE"},
        ),
        ("a.b=64,16, 32", {"type": "DISCRETE", "discreteValues": [16.0, 32.0, 64.0]}),
        ("a.b=relu,gelu", {"type": "CATEGORICAL", "categoricalValues": ["relu", "gelu"]}),
        ("a.b=1,two", {"type": "CATEGORICAL", "categoricalValues": ["1", "two"]}),
        ("a.b=../x,../y", {"type": "CATEGORICAL", "categoricalValues": ["../x", "../y"]}),
    ],
)
def test_a_search_space(text: str, spec: dict[str, object]):
    assert parameter_spec(text) == {"parameterName": "a.b", **spec}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "--param lr: expected NAME=LOW..HIGH"),
        ("lr=3", "--param lr=3: expected NAME=LOW..HIGH"),
        ("=1..2", "expected NAME=LOW..HIGH"),
        ("lr=1..two", "the ends of a range must be numbers"),
        ("lr=0..inf", "the ends of a range must be numbers"),
        ("lr=2..1", "1 is less than 2"),
        ("lr=log:0..1", "a logarithm needs numbers above 0"),
        ("lr=a,a", "a value is given twice"),
        ("lr=a,,b", "expected NAME=LOW..HIGH"),
    ],
)
def test_a_search_space_in_another_form_is_refused(text: str, message: str):
    with pytest.raises(ConfigError) as raised:
        parameter_spec(text)
    assert message in str(raised.value)


def test_the_code_of_a_submission_is_kept_without_data_runs_and_environments(tmp_path: Path):
    project = tmp_path / "project"
    for name in (
        "net.py", "run.yaml", "parts/block.py", "rows.parquet", "runs/old/config.yaml", "env/pyvenv.cfg", "env/lib/x.py",
        ".git/hook.py",
    ):  # fmt: skip
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(name)
    (tmp_path / "into").mkdir()
    package = code_package(project, tmp_path / "into")
    files = sorted(path.relative_to(package / "files").as_posix() for path in package.rglob("*") if path.is_file()
                   and path.name != "__init__.py")  # fmt: skip
    assert files == ["net.py", "parts/block.py", "run.yaml"]


def test_the_imports_of_the_users_modules_that_are_named_are_known(tmp_path: Path):
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "small.py").write_text("import torchvision\nclass Net: ...\n")
    (tmp_path / "rows.py").write_text("import deltalake\n")
    (tmp_path / "unused.py").write_text("import tensorflow\n")
    (tmp_path / "run.yaml").write_text("model:\n  class_path: nets.small.Net\n")
    names = trial_imports(tmp_path, ["run.yaml"], ["--data=rows.Data", "--trainer.max_epochs=3"])
    assert {"footplate.cli.fit", "torchvision", "deltalake"} <= set(names)
    assert "tensorflow" not in names


def test_a_trial_reads_configuration_files_as_they_were_submitted(tmp_path: Path):
    (tmp_path / "run.yaml").touch()
    words = [
        "--config",
        "run.yaml",
        "--config=other.yaml",
        "--data=run.yaml",
        "--model.lr=0.1",
        "--job-dir",
        "runs/a/3",
    ]
    assert fit_arguments(words, tmp_path) == [
        "--config", f"{tmp_path}/run.yaml", "--config=other.yaml", f"--data={tmp_path}/run.yaml", "--model.lr=0.1",
        "--trainer.default_root_dir", "runs/a/3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--param: not given"),
        (["--param", "model.lr=1..2"], "--metric: not given"),
        (["--param", "model.lr=1", "--metric", "loss"], "--param model.lr=1: expected"),
        (["--param", "a=1..2", "--metric", "loss", "--config", "no.yaml"], "--config no.yaml: there is no such file"),
        (
            ["--param", "a=1..2", "--metric", "l", "--from-checkpoint", "no.ckpt"],
            "--from-checkpoint: no.ckpt is not a compl",
        ),
        (["--param", "a=1..2", "--metric", "l", "--perturbation-interval", "2"], "is for --stop-early pbt"),
        (["--param", "a=1..2", "--metric", "l", "--stop-early", "pbt", "--parallel", "3"], "Run at least 4 at once"),
        (
            ["--param", "a=1..2", "--metric", "l", "--from-checkpoint", "x", "--", "--ckpt_path=x"],
            "--ckpt_path resumes one training, and --from-checkpoint begins all trials",
        ),
        (["--param", "a=1..2", "--metric", "loss", "--trials", "0"], "maxTrials: 0: expected 1 or more"),
        (["--param", "a=0.5..2", "--metric", "loss", "--algorithm", "grid"], "GRID_SEARCH takes no DOUBLE"),
        (["--param", "a=1..2", "--metric", "l", "--", "--trainer.default_root_dir=x"], "Give --job-dir to tune"),
        (["--resume", "none", "--metric", "loss", "--param", "a=1..2"], "leave out all else but --format"),
        (["--resume", "none"], 'there is no job "none"'),
    ],
)
def test_mistakes_are_told_before_any_work(
    footplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
):
    monkeypatch.setenv("FOOTPLATE_HOME", str(tmp_path / "home"))
    result = footplate("tune", *words)
    assert (result.code, message in result.err) == (2, True), result.err


@pytest.mark.slow
def test_all_trials_begin_from_one_checkpoint_with_hyperparameters_of_their_own(
    footplate, trial_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    base = tmp_path / "base"
    result = footplate("fit", *trial_flags, "--trainer.default_root_dir", base)
    assert result.code == 0, result.err
    longer = [*trial_flags, "--trainer.max_epochs=4"]
    result = footplate(
        "tune", "rates", "--param", "model.lr=0.001,0.05", "--metric", "val_loss", "--algorithm", "grid",
        "--trials", 2, "--seed", "3", "--job-dir", tmp_path / "rates", "--format", "json",
        "--from-checkpoint", base / "checkpoints" / "last.ckpt", "--", *longer,
    )  # fmt: skip
    assert result.code == 0, result.err
    output = json.loads(result.out)
    assert [trial["state"] for trial in output["trials"]] == ["SUCCEEDED", "SUCCEEDED"]
    assert output["startCheckpoint"] == str(tmp_path / "rates" / "start.ckpt")
    # The checkpoint that the trials need is theirs, whatever happens to the first one.
    shutil.rmtree(base)
    run = tmp_path / "rates" / output["bestTrial"]["jobId"].removeprefix("rates_trial_")
    first_step = int((run / "metrics.csv").read_text().splitlines()[1].split(",")[0])
    assert first_step > checkpoint.read_meta(tmp_path / "rates" / "start.ckpt")["global_step"]
    seed, start, *command = output["bestTrial"]["command"].split()
    assert (seed, start) == ("FOOTPLATE_SEED=3", f"FOOTPLATE_FROM_CHECKPOINT={tmp_path}/rates/start.ckpt")
    monkeypatch.setattr(job, "_fits", itertools.count(1))
    monkeypatch.setenv("FOOTPLATE_FROM_CHECKPOINT", start.partition("=")[2])
    again = footplate(*command[1:], "--trainer.default_root_dir", tmp_path / "again")
    assert again.code == 0, again.err
    assert (tmp_path / "again" / "metrics.csv").read_text() == (run / "metrics.csv").read_text()


@pytest.mark.slow
def test_a_tuning_finds_the_best_trial_and_the_command_that_repeats_it(
    footplate, trial_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    result = footplate(
        "tune", "rates", "--param", "model.lr=0.001,0.5", "--metric", "val_loss", "--algorithm", "grid", "--trials", 2,
        "--parallel", 2, "--seed", "3", "--job-dir", tmp_path / "rates", "--format", "json", "--", *trial_flags,
    )  # fmt: skip
    assert result.code == 0, result.err
    output = json.loads(result.out)
    losses = [trial["finalMetric"]["objectiveValue"] for trial in output["trials"]]
    assert losses == sorted(losses)
    best = output["bestTrial"]
    assert best["objectiveValue"] == losses[0]
    run = tmp_path / "rates" / best["jobId"].removeprefix("rates_trial_")
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["lr"] == 0.5
    table = footplate("jobs", "describe", "rates", "--format", "table")
    assert f"The best is {best['jobId']}, val_loss=" in table.out
    # The command trains the same model again.
    prefix, *command = best["command"].split()
    assert prefix == "FOOTPLATE_SEED=3"
    monkeypatch.setenv("FOOTPLATE_SEED", "3")
    again = footplate(*command[1:], "--trainer.default_root_dir", tmp_path / "again")
    assert again.code == 0, again.err
    assert (tmp_path / "again" / "metrics.csv").read_text() == (run / "metrics.csv").read_text()


@pytest.mark.engine
@pytest.mark.slow
def test_trials_on_a_cluster_train_as_those_of_this_machine(
    footplate, trial_flags: list[str], slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    monkeypatch.setenv("FOOTPLATE_SEED", "77")
    curves = []
    for backend in ("local", "slurm"):
        job_dir = tmp_path / backend
        result = footplate(
            "tune", f"on_{backend}", "--param", "model.lr=0.001,0.5", "--metric", "val_loss", "--algorithm", "grid",
            "--trials", 2, "--seed", "3", "--job-dir", job_dir, "--backend", backend, "--", *trial_flags,
        )  # fmt: skip
        assert result.code == 0, result.err
        curves.append([(job_dir / trial / "metrics.csv").read_text() for trial in ("1", "2")])
    assert curves[0] == curves[1]
    assert os.environ["FOOTPLATE_SEED"] == "77"
    result = footplate("tune", "rates", "--param", "model.lr=1..2", "--metric", "val_loss", "--partition", "gpu")
    assert (result.code, "--partition is for --backend slurm: give that, too" in result.err) == (2, True), result.err
