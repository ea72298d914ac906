"""`footplate rows`, `footplate replay` and `footplate verify`, on runs of `footplate fit`."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from deltalake import DeltaTable, write_deltalake

from footplate.cli.rows import heading
from footplate.replaying.step_rows import Row, StepRows

FIT = """
model: {class_path: flowers.Net}
data: {class_path: TableDataModule, init_args: {train: lake, batch_size: 8}}
trainer:
  max_epochs: 2
  accelerator: cpu
  default_root_dir: run
  callbacks: [{class_path: ModelCheckpoint, init_args: {every_n_train_steps: 4, save_top_k: -1}}]
"""


@pytest.fixture
def run_dir(footplate, project, tmp_path, monkeypatch) -> Path:
    """A run on version 0 of a Delta table, which has a later version now, in the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flowers.py").write_text((project / "flowers.py").read_text())
    rows = pq.read_table(project / "rows.parquet")
    write_deltalake("lake", rows)
    Path("run.yaml").write_text(FIT)
    assert footplate("fit", "--config", "run.yaml").code == 0
    write_deltalake("lake", rows.slice(0, 10), mode="append")
    return Path("run")


def test_rows_are_shown(footplate, run_dir):
    document = json.loads(footplate("rows", "run", "--step", "5", "--json").out)
    assert (document["step"], document["epoch"], document["batches"], document["ranks"]) == (5, 0, [4], 1)
    assert {(row["table"], row["version"], row["rank"]) for row in document["rows"]} == {("lake", 0, 0)}
    shown = footplate("rows", "run", "--step", "5").out
    assert "step 5: batch 4 of epoch 0" in shown
    assert "table: lake, version 0" in shown
    assert all(f" {row['row_in_file']} " in f"{shown} " for row in document["rows"])
    assert "older than this step" in footplate("rows", "run", "--step", "999").out


def test_long_names_of_files_are_shown_whole_and_apart_from_the_rows(footplate, run_dir):
    (name,) = (Path(uri).name for uri in DeltaTable("lake", version=0).file_uris())
    assert len(name) > 60
    shown = footplate("rows", "run", "--step", "5").out.splitlines()
    assert f"files in {Path('lake').absolute()}/" in shown
    assert f"file 0: {name}" in shown


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        (["/lake/part-1", "/lake/part-2", "/lake/part-1"], ["files in /lake/", "file 0: part-1", "file 1: part-2"]),
        (["s3://lake/day=1/a", "s3://lake/day=10/a"], ["files in s3://lake/", "file 0: day=1/a", "file 1: day=10/a"]),
        (["/lake/a", "s3://lake/a"], ["file 0: /lake/a", "file 1: s3://lake/a"]),
    ],
)
def test_files_are_named_below_the_folder_that_they_have_in_common(files, shown):
    rows = [Row(0, 0, 0, "lake", 0, file, 0, 0, 0) for file in files]
    assert heading(StepRows(1, 0, [0], 1, False, rows))[2:] == shown


def test_a_replay_of_a_fit_is_rebuilt_from_its_configuration(footplate, run_dir):
    shown = footplate("replay", "run", "--step", "6", "--output", "step.pt")
    assert shown.code == 0
    assert "net.weight" in shown.out
    assert "1 step after run/checkpoints/epoch=0-step=4.ckpt" in shown.out
    written = torch.load("step.pt", weights_only=True)
    assert (written["step"], written["batch_indices"], len(written["batches"][0][0]["y"])) == (6, [5], 8)

    summary = json.loads(footplate("replay", "run", "--step", "6", "--json").out)
    assert summary["losses_hex"] == [[float(written["losses"][0][0]).hex()]]
    assert summary["gradients"]["net.weight"]["shape"] == [2, 4]
    again = json.loads(footplate("replay", "run/checkpoints/epoch=0-step=4.ckpt", "--step", "6", "--json").out)
    assert again["losses_hex"] == summary["losses_hex"]


def test_a_fit_is_verified(footplate, run_dir):
    result = footplate("verify", "run", "--from", "4")
    assert result.code == 0
    assert "All states are the same." in result.out
    steps = [state["step"] for state in json.loads(footplate("verify", "run", "--json", "--to", "8").out)["compared"]]
    assert steps == [8]

    # Another learning rate stands for a bad machine.
    config = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(config.replace("lr: 0.1", "lr: 0.2"))
    result = footplate("verify", "run", "--from", "0")
    assert result.code == 1
    assert "The states diverge in one of the steps 1 to 4" in result.out
    assert "net.weight" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rows", "run"], "step: not given"),
        (["rows", "nowhere", "--step", "1"], "nothing at nowhere"),
        (["rows", "run", "--step", "0"], "at least 1"),
        (["rows", "run", "--step", "many"], "expected an integer"),
        (["replay", "run", "--step", "500"], "training ended at step"),
        (["replay", "run", "--step", "1", "--output", "no/where.pt"], "its directory doesn't exist"),
        (["verify", "run", "--from", "9", "--to", "3"], "expected a later step"),
    ],
)
def test_mistakes_are_one_message(footplate, run_dir, arguments, message):
    result = footplate(*arguments)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err


def test_a_vacuumed_version_is_one_message(footplate, run_dir):
    write_deltalake("lake", DeltaTable("lake").to_pyarrow_table(), mode="overwrite")
    DeltaTable("lake").vacuum(0, dry_run=False, enforce_retention_duration=False)
    result = footplate("rows", "run", "--step", "1")
    assert result.code == 2
    assert "Version 0 of lake" in result.err
