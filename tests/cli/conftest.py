"""A small project like a user's, a function that runs commands in it, and a real process for tests that need one."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import template

from footplate.cli.main import main

PROJECT = {
    "flowers.py": """
import torch
import torch.nn.functional as F

import footplate as fp


class Net(fp.Module):
    def __init__(self, lr: float = 0.1, bias: bool = True):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, 2, bias=bias)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch["x"]), batch["y"]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self.net(batch["x"]), batch["y"]))

    def predict_step(self, batch, batch_idx):
        return {"y": batch["y"], "guess": self.net(batch["x"]).argmax(1)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Slow(Net):
    def on_train_batch_start(self, batch, batch_idx):
        import time

        time.sleep(0.05)
        print("training", flush=True)


class Refusing(Net):
    def __init__(self, lr: float = 0.1):
        raise ValueError("the constructor's own complaint")


class WrongColumn(Net):
    def training_step(self, batch, batch_idx):
        return batch["z"].sum()
""",
    "lit.py": """
import lightning.pytorch as pl
import torch
import torch.nn.functional as F


class LitNet(pl.LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class LitData(pl.LightningDataModule):
    def __init__(self, rows: int = 8):
        super().__init__()
        self.rows = rows

    def train_dataloader(self):
        data = torch.utils.data.TensorDataset(torch.randn(self.rows, 4), torch.ones(self.rows, dtype=torch.long))
        return torch.utils.data.DataLoader(data, batch_size=4)


class Told(pl.Callback):
    def __init__(self, text: str):
        self.text = text

    def on_train_end(self, trainer, pl_module):
        print(self.text, trainer.global_step)
""",
    "broken.py": "1 / 0\n",
    "lacking.py": "import a_package_that_nobody_has\n",
    "half.py": "def training_step(:\n",
}


@dataclass(frozen=True)
class Outcome:
    """The result of a command."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with modules and the tables rows.parquet (64 rows), empty, labels (beyond the
    model's outputs) and images (damaged).
    """
    root = tmp_path_factory.mktemp("project")
    for name, text in PROJECT.items():
        (root / name).write_text(text)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 4), "y": pa.array((x[:, 0] > 0) * 1)}
    rows = pa.table(columns)
    pq.write_table(rows, root / "rows.parquet")
    pq.write_table(rows.slice(0, 0), root / "empty.parquet")
    pq.write_table(rows.set_column(1, "y", pa.array([7] * 64)), root / "labels.parquet")
    pq.write_table(pa.table({"x": [b"\x89PNG\r\n\x1a\n and no more"] * 64, "y": [1] * 64}), root / "images.parquet")
    return root


@pytest.fixture
def footplate(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Outcome]]:
    """Runs `footplate …` in the project, in this process."""
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("FOOTPLATE_SEED", "0")
    monkeypatch.setenv("FOOTPLATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    level = logging.getLogger("footplate").level

    def run(*argv: object) -> Outcome:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as exit:
            code = int(exit.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    yield run
    logging.getLogger("footplate").setLevel(level)


@pytest.fixture
def process(project: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts `python -m footplate …` in the project, as a process of its own."""
    return functools.partial(start, subprocess.Popen, project)


@pytest.fixture
def forked(project: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts `python -m footplate …` as `process` does, but in a fork with torch (`template.py`)."""
    return functools.partial(start, template.Popen, project)


def start(popen: Callable[..., Any], project: Path, *argv: object, **environ: str) -> Any:
    return popen(
        [sys.executable, "-m", "footplate", *map(str, argv)],
        cwd=project,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def net(tmp_path: Path) -> list[str]:
    """Flags of a quick run on rows.parquet, in a directory of the test's own."""
    return [
        "--model=flowers.Net",
        "--data=TableDataModule",
        "--data.train=rows.parquet",
        "--data.val=rows.parquet",
        "--data.batch_size=16",
        "--trainer.max_epochs=1",
        f"--trainer.default_root_dir={tmp_path / 'run'}",
    ]
