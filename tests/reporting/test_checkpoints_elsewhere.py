"""Reports of runs whose checkpoints are elsewhere: in a bucket, on real servers, or in another directory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from object_storage import own_bucket

import footplate as fp
from footplate.checkpoint.storage import is_remote
from footplate.reporting.run_record import read_run
from footplate.reporting.run_tables import training_tables
from footplate.reporting.sections_training import epochs_of


class Net(fp.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch["x"].reshape(-1, 1).float()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.fixture(params=["s3", "gs"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of a directory in a bucket, on a server of its own."""
    with own_bucket(request.param, monkeypatch) as uri:
        yield uri


def train(run: Path, dirpath: str | Path) -> None:
    pq.write_table(pa.table({"x": [1.0] * 16}), run.parent / "rows.parquet")
    data = fp.TableDataModule(train=str(run.parent / "rows.parquet"), batch_size=4)
    fp.Trainer(
        accelerator="cpu", max_epochs=2, default_root_dir=run, logger=fp.CSV(), enable_progress_bar=False,
        enable_model_summary=False, callbacks=fp.ModelCheckpoint(dirpath=dirpath),
    ).fit(Net(), data)  # fmt: skip


@pytest.mark.engine
def test_checkpoints_in_a_bucket_are_read(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    train(tmp_path / "run", f"{bucket}/checkpoints")
    assert not list((tmp_path / "run").rglob("meta.json"))

    run = read_run(tmp_path / "run")
    assert run.checkpoint is not None
    assert is_remote(run.checkpoint.path)
    assert str(run.checkpoint.path).startswith(f"{bucket}/checkpoints/")
    assert (run.checkpoint.global_step, epochs_of(run)) == (8, 2)
    (table,) = training_tables(run)
    assert "rows.parquet" in str(table)
    assert fp.report(tmp_path / "run").exists()

    # `--no-data` reads nothing over the network, and a bucket that is gone is a warning.
    assert read_run(tmp_path / "run", data=False).checkpoint is None
    assert not caplog.records
    (record,) = [line for line in (tmp_path / "run" / "monitor.jsonl").read_text().splitlines() if '"start"' in line]
    (tmp_path / "run" / "monitor.jsonl").write_text(record.replace(bucket, f"{bucket}-gone") + "\n")
    with caplog.at_level(logging.WARNING):
        assert read_run(tmp_path / "run").checkpoint is None
    (warning,) = caplog.messages
    assert f"{bucket}-gone/checkpoints" in warning
    assert warning.endswith("The report leaves these checkpoints out.")


def test_checkpoints_in_another_directory_are_read(tmp_path: Path):
    train(tmp_path / "run", tmp_path / "elsewhere")
    run = read_run(tmp_path / "run")
    assert run.checkpoint is not None
    assert (run.checkpoint.path.parent, run.checkpoint.global_step) == (tmp_path / "elsewhere", 8)
