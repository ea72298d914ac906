"""The recipes: each is copied by `footplate new`, and trains on its own small tables."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import template
from safetensors.torch import load_file

from footplate import checkpoint
from footplate.cli.main import main


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Copies a recipe. Returns a function that runs one of its commands, and the output of that."""
    monkeypatch.setenv("PL_TRAINER_ACCELERATOR", "cpu")

    def copy(recipe: str):
        directory = tmp_path / recipe
        assert main(["new", str(directory), "--recipe", recipe]) == 0

        def run(*command: object) -> str:
            process = template.Popen(
                [sys.executable, *command], packages=template.WITH_LIGHTNING, cwd=directory, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
            return output

        return run

    return copy


def numbers_of(printed: str, name: str) -> list[float]:
    """The numbers in the row of a printed table."""
    (row,) = re.findall(rf"^{name} +(.*)$", printed, re.MULTILINE)
    return [float(number) for number in row.split()]


@pytest.mark.slow
def test_tabular_is_as_good_as_boosted_trees(copied):
    run = copied("tabular")
    run("data.py", "--rows", 6_000)
    printed = run("train.py")
    network, trees = numbers_of(printed, "this network"), numbers_of(printed, "boosted trees")
    assert network[1] > 0.75  # ROC AUC; 0.5 before training
    assert network[1] > trees[1] - 0.06


@pytest.mark.slow
def test_image_trains_a_network_of_timm_with_a_moving_average(copied):
    run = copied("image")
    run("data.py")
    printed = run(
        "-m", "footplate", "fit", "--config", "run.yaml", "--model.network=timm:test_resnet", "--model.lr=3e-3",
        "--data.batch_size=16", "--trainer.max_epochs=1", "--trainer.limit_train_batches=150",
        "--trainer.limit_val_batches=8",
    )  # fmt: skip
    accuracies = re.findall(r"val_acc (\S+)", printed)
    assert float(accuracies[-1]) > 0.2  # 0.1 before training


@pytest.mark.slow
def test_transfer_learns_from_few_rows_since_its_backbone_is_pretrained(copied):
    run = copied("transfer")
    run("data.py")
    printed = run(
        "-m", "footplate", "fit", "--config", "run.yaml", "--model.frozen_epochs=1", "--trainer.max_epochs=2",
        "--data.image_size=64", "--trainer.limit_train_batches=12", "--trainer.limit_val_batches=6",
        "--trainer.num_sanity_val_steps=0",
    )  # fmt: skip
    accuracies = re.findall(r"val_acc (\S+)", printed)
    assert float(accuracies[-1]) > 0.45  # 0.1 before training


@pytest.mark.slow
def test_two_tower_recommends_better_than_popularity(copied):
    run = copied("two_tower")
    run("data.py", "--users", 1000, "--items", 400)
    printed = run("train.py")
    towers, popular = numbers_of(printed, "two towers"), numbers_of(printed, "popular items")
    assert towers[1] > 1.2 * popular[1]  # recall@50


@pytest.mark.slow
def test_time_series_forecasts_better_than_last_week(copied):
    run = copied("time_series")
    run("data.py", "--stations", 40, "--days", 60)
    printed = run("train.py")
    network, naive = numbers_of(printed, "this network"), numbers_of(printed, "seasonal naive")
    assert network[0] < 0.95 * naive[0]  # mean absolute error


@pytest.mark.slow
def test_language_model_learns_with_lora_and_is_merged(copied, tmp_path, monkeypatch):
    run = copied("language_model")
    run("data.py")
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "15")
    run("base.py")
    printed = run(
        "-m", "footplate", "fit", "--config", "run.yaml", "--trainer.max_epochs=1",
        "--trainer.limit_train_batches=30", "--trainer.limit_val_batches=4",
    )  # fmt: skip
    losses = re.findall(r"val_loss (\S+)", printed)
    assert float(losses[-1]) < 3.15  # 3.23 before

    directory = tmp_path / "language_model"
    state = checkpoint.load(directory / "runs" / "language_model" / "checkpoints" / "last.ckpt")
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in state["state_dict"]} == {"up", "down"}

    run("merge.py", "runs/language_model", "merged")
    base, merged = (load_file(directory / name / "model.safetensors") for name in ("base", "merged"))
    changed = {name.rpartition(".")[0].rpartition(".")[2] for name in base if not base[name].equal(merged[name])}
    assert merged.keys() == base.keys()
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
