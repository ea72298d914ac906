"""Every public name has an example in its docstring, and the examples run.

The examples are doctests. They share the names that `names` makes: a module, two loaders, a table and a run of it. `USES`
has what only some examples need.
"""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import public_names
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp
from footplate.demo import TABLES

NAMES = [name for name in public_names.public_names() if name not in public_names.CONSTANTS]
# Examples that start processes, compile, or import Lightning.
SLOW = {
    "footplate.Runner",
    "footplate.launch.launch",
    "footplate.scale",
    "footplate.plan",
    "footplate.data.block_mask",
    "footplate.LaunchError",
    "footplate.data.MappedTable",
    "footplate.export_model",
    "footplate.report",
    "footplate.Report",
    "footplate.compat.horovod.HorovodRunner",
    "footplate.compat.lightning.cli.LightningCLI",
    "footplate.compat.lightning.load_from_checkpoint",
    "footplate.lab.Command",
    "footplate.lab.Lab",
    "footplate.lab.Machine",
    "footplate.lab.why_not",
}
# What an example uses, and the fixture that makes it.
USES = {"runs/flowers": "a_run", "hvd.": "horovod", "input_fn": "estimator", "Jobs.from_env": "a_tuning"}


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
        "train": loader(), "val": loader(),
        "__name__": "examples_of_docstrings",  # no installed module has this name
    }  # fmt: skip


@pytest.fixture
def a_run(names: dict[str, Any]) -> None:
    """A finished run in runs/flowers, of two epochs of two steps each, with a checkpoint of each epoch."""
    trainer = fp.Trainer(
        max_epochs=2, seed=1, callbacks=[fp.ModelCheckpoint(save_top_k=-1)], default_root_dir="runs/flowers"
    )
    trainer.fit(Flat(), fp.TableDataModule(train="flowers.parquet", batch_size=4, seed=1))


@pytest.fixture
def horovod(names: dict[str, Any]) -> Iterator[None]:
    """Horovod's verbs as `hvd`, with one rank."""
    import footplate.compat.horovod as hvd

    hvd.init()
    names["hvd"] = hvd
    yield
    hvd.shutdown()


@pytest.fixture
def estimator(names: dict[str, Any]) -> None:
    """The `model_fn`, `input_fn` and trained `estimator` of the example of `Estimator`."""
    doc = inspect.getdoc(public_names.value_of("footplate.compat.estimator.Estimator")) or ""
    for example in doctest.DocTestParser().get_examples(doc):
        exec(example.source, names)


@pytest.fixture
def a_tuning(names: dict[str, Any]) -> None:
    """A tuning in the store, of which the second trial is the best."""
    from footplate.jobs.home import Home
    from footplate.jobs.record import Job, Trial, TrialState
    from footplate.jobs.states import State
    from footplate.jobs.store import open_store
    from footplate.jobs.tuning.plan import TuningPlan

    params = [{"parameterName": "lr", "type": "DISCRETE", "discreteValues": [0.1, 0.5]}]
    plan = TuningPlan.of({"goal": "MINIMIZE", "hyperparameterMetricTag": "val_loss", "params": params}, seed=1)
    store = open_store(Home.from_env())
    store.add(Job("rates", State.SUCCEEDED, 1.0, 1.0, "here", plan={"tuning": plan.to_dict()}))
    for number, lr, value in ((1, 0.5, 0.75), (2, 0.1, 0.25)):
        job = Job(f"rates_trial_{number}", State.SUCCEEDED, 1.0, 1.0, "here")
        store.trials.add(
            Trial("rates", number, job.name, TrialState.SUCCEEDED, {"lr": lr}, (), value, 8, 1.0, 2.0), job
        )


def test_every_module_that_exports_names_is_public_or_internal():
    known = {*public_names.PACKAGES, *public_names.INTERNAL}
    assert public_names.exporting_modules() == known, "add it to PACKAGES or INTERNAL of tests/public_names.py"


def test_every_public_name_has_an_example():
    without = [name for name in NAMES if ">>> " not in (inspect.getdoc(public_names.value_of(name)) or "")]
    assert without == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NAMES]
)
def test_the_example_of_a_name_runs(name, names, request):
    doc = inspect.getdoc(public_names.value_of(name)) or ""
    examples = doctest.DocTestParser().get_doctest(doc, names, name, None, None)
    source = "".join(example.source for example in examples.examples)
    for words, fixture in USES.items():
        if words in source:
            request.getfixturevalue(fixture)

    report: list[str] = []
    examples.globs.update(names)
    runner = doctest.DocTestRunner(Checker(), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    results = runner.run(examples, out=report.append)
    assert results.attempted
    assert not results.failed, "".join(report)
