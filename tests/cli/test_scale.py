"""`footplate scale`: functions and scripts at several sizes, and programs that can't be studied."""

from __future__ import annotations

import json

import pytest

STUDIED = """
import os


def fit():
    return {"val_loss": 0.5, "samples": 100, "seconds": 2.0 / int(os.environ["WORLD_SIZE"])}


def nothing():
    pass


def fails():
    raise RuntimeError("never works")


NUMBER = 3
"""

SCRIPT = """
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp
from flowers import Net

rows = [{"x": torch.randn(4), "y": torch.tensor(1)} for _ in range(int(sys.argv[1]))]
fp.Trainer(accelerator="cpu", max_epochs=1, logger=False, default_root_dir="run").fit(
    Net(), DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=4)
)
"""


@pytest.fixture
def scale(footplate, project, tmp_path):
    """Runs `footplate scale …` with small sizes, without MLflow."""
    (project / "studied.py").write_text(STUDIED)
    (project / "train.py").write_text(SCRIPT)
    small = ["--repeat=1", f"--output={tmp_path / 'out'}", "--experiment=null"]
    return lambda *argv: footplate("scale", *small, *argv)


@pytest.mark.slow
def test_a_function_is_studied(scale, tmp_path):
    done = scale("studied:fit", "--np", "1,2")
    assert done.code == 0, done.err
    assert "2 processes took 1 s, and 1 took 2 s: efficiency 1.00." in " ".join(done.out.split())
    assert (tmp_path / "out/scaling.png").exists()


@pytest.mark.slow
def test_a_script_with_a_trainer_is_studied_with_its_arguments(scale):
    done = scale("train.py", "--np=1,2", "--json", "--", "16")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert [training["samples"] for training in document["trainings"]] == [16, 16]
    assert all(size["loss"]["median"] > 0 for size in document["sizes"])
    assert document["setup"]["name"] == "train"


@pytest.mark.slow
def test_a_function_that_returns_nothing_has_a_running_time_alone(scale):
    done = scale("--np=1", "studied:nothing")
    assert done.code == 0
    assert "Only the running time is known" in " ".join(done.out.split())


@pytest.mark.slow
def test_where_no_training_succeeds_the_code_is_1(scale):
    done = scale("--np=1", "studied:fails")
    assert done.code == 1
    assert "RuntimeError: never works" in " ".join(done.out.split())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "expected a function or a script"),
        (["--np=0", "studied:fit"], "np=0: expected numbers of processes"),
        (["--np=1,x", "studied:fit"], "--np=1,x: expected numbers of processes"),
        (["--np=1", "--lr-rule=cubic", "studied:fit"], "cubic"),
        (["--np=1", "--repeat=0", "studied:fit"], "repeat=0"),
        (["--np=1", "studied:fti"], 'Did you mean "fit"?'),
        (["--np=1", "studied:NUMBER"], "has no function of this name"),
        (["--np=1", "nowhere:fit"], "there is no module 'nowhere'"),
        (["--np=1", "nowhere.py"], "there is no such script"),
        (["--np=1", "studied:fit", "--", "--lr", "1"], "called without arguments"),
    ],
)
def test_a_mistake_is_one_message(scale, argv, said, tmp_path):
    done = scale(*argv)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()
