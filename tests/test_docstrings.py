"""Every public name has an example in its docstring, and the examples run.

The examples are doctests. They share the names that `names` makes: a module, two loaders, a table and a run of it.
"""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp
from footplate import callbacks, data, launch, scaling, tracking
from footplate.demo import TABLES
from footplate.launch import worker

WORKER = ("attempt", "inside", "kept", "log_to_driver", "progressed", "saved", "slot")
# The public classes and functions, by name. Several packages export some of them.
PUBLIC = {
    name: value
    for package, names in [
        *((package, package.__all__) for package in (fp, callbacks, tracking, data, launch, scaling)),
        (worker, WORKER),
    ]
    for name, value in [(name, getattr(package, name)) for name in names]
    if inspect.isclass(value) or inspect.isfunction(value)
}
# Examples that start processes or compile.
SLOW = {
    "Runner",
    "launch",
    "scale",
    "plan",
    "block_mask",
    "LaunchError",
    "MappedTable",
    "export_model",
    "report",
    "Report",
}


class Checker(doctest.OutputChecker):
    """Compares the output of a statement only if the example shows one: trainers print their progress."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


class Flat(fp.Module):
    """The module of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.lr = 0.01

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layer(features)

    def step(self, batch: Any) -> torch.Tensor:
        features, target = (batch["x"], batch["label"].float()) if isinstance(batch, dict) else batch
        return torch.nn.functional.mse_loss(self(features).squeeze(1), target)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.step(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(32, 4), torch.ones(32)), batch_size=4)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that examples use without making them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOOTPLATE_HOME", str(tmp_path / "home"))
    for variable in ("ALERT_URL", "SLACK_URL"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9/")
    features = pa.array([[row / 8] * 4 for row in range(8)], pa.list_(pa.float32()))
    pq.write_table(pa.table({"x": features, "label": [row % 3 for row in range(8)]}), "flowers.parquet")
    return {
        "fp": fp, "torch": torch, "TABLES": TABLES, "model": Flat(), "table_model": Flat(), "new_model": Flat,
        "train": loader(), "val": loader(), "__name__": "example",
    }  # fmt: skip


@pytest.fixture
def a_run(names: dict[str, Any]) -> None:
    """A finished run in runs/flowers, of two epochs of two steps each, with a checkpoint of each epoch."""
    trainer = fp.Trainer(
        max_epochs=2, seed=1, callbacks=[fp.ModelCheckpoint(save_top_k=-1)], default_root_dir="runs/flowers"
    )
    trainer.fit(Flat(), fp.TableDataModule(train="flowers.parquet", batch_size=4, seed=1))


def test_every_public_name_has_an_example():
    without = [name for name, value in PUBLIC.items() if ">>> " not in (inspect.getdoc(value) or "")]
    assert without == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in sorted(PUBLIC)]
)
def test_the_example_of_a_name_runs(name, names, request):
    examples = doctest.DocTestParser().get_doctest(inspect.getdoc(PUBLIC[name]) or "", names, name, None, None)
    if any("runs/flowers" in example.source for example in examples.examples):
        request.getfixturevalue("a_run")

    report: list[str] = []
    runner = doctest.DocTestRunner(Checker(), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    results = runner.run(examples, out=report.append)
    assert results.attempted
    assert not results.failed, "".join(report)
