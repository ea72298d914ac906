"""The page of likely errors: each message on it is the one that the mistake raises.

A case makes the mistake of one section of docs/guide/troubleshooting.md. An ellipsis in a message on the page stands for
what depends on the machine, such as a path or the number of devices.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp

PAGE = Path(__file__).parent.parent / "docs" / "guide" / "troubleshooting.md"
SECTIONS = dict(re.findall(r"^### ([^\n]+)\n\n```text\n(.*?)\n```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
CASES: dict[str, Callable[[], Any]] = {}


class Net(fp.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(width: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(8, width)), batch_size=4)


def trainer(**arguments: Any) -> fp.Trainer:
    return fp.Trainer(**{"accelerator": "cpu", "max_epochs": 1, "default_root_dir": "runs/flowers", **arguments})


def case(heading: str) -> Callable[[Callable[[], Any]], None]:
    """Register a function as the mistake of a section."""

    def register(mistake: Callable[[], Any]) -> None:
        CASES[heading] = mistake

    return register


@case("An accelerator that isn't here")
def _() -> None:
    trainer(accelerator="mps").fit(Net(), loader())


@case("Too many devices")
def _() -> None:
    trainer(devices=1000)


@case("A missing package")
def _() -> None:
    trainer(logger=fp.MLflow("flowers")).fit(Net(), loader())


@case("A misspelt argument")
def _() -> None:
    fp.Trainer(max_epoch=3)  # pyright: ignore[reportCallIssue]


@case("An unknown precision")
def _() -> None:
    trainer(precision="fp8")


@case("A plain torch module")
def _() -> None:
    trainer().fit(torch.nn.Linear(4, 1), loader())


@case("No data to train on")
def _() -> None:
    trainer().fit(Net())


@case("A metric that nothing logs")
def _() -> None:
    trainer(callbacks=[fp.EarlyStopping("val_lss")]).fit(Net(), loader())


@case("A logged tensor of several numbers")
def _() -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("scores", self.layer(batch[0]))

    trainer().fit(Logs(), loader())


@case("A directory that is in use")
def _() -> None:
    class TrainsAgain(fp.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            globals()["trainer"]().fit(Net(), loader())

    trainer(callbacks=[TrainsAgain()]).fit(Net(), loader())


@case("A directory that can't be written to")
def _() -> None:
    trainer(default_root_dir="/proc/runs").fit(Net(), loader())


@case("A checkpoint that isn't there")
def _() -> None:
    trainer().fit(Net(), loader(), ckpt_path="runs/flowers/checkpoints/best.ckpt")


@case("A checkpoint of another model")
def _() -> None:
    trainer().fit(Net(), loader())
    trainer(max_epochs=2).fit(Net(width=8), loader(8), ckpt_path="last")


@case("No best checkpoint")
def _() -> None:
    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    first = trainer(callbacks=[fp.ModelCheckpoint(save_top_k=0)])
    first.fit(Validated(), loader(), loader())
    first.validate(dataloaders=loader(), ckpt_path="best")


@case("A table that isn't there")
def _() -> None:
    fp.Table("lake/flowers")


@case("A column that isn't there")
def _() -> None:
    fp.Table("flowers.parquet", columns=["lable"])


@case("A column with nulls")
def _() -> None:
    list(fp.Loader(fp.Table("flowers.parquet", columns=["height"]), batch_size=2))


@case("A column that a batch can't hold")
def _() -> None:
    fp.Loader(fp.Table("flowers.parquet", columns=["bounds"]), batch_size=2)


@case("A run that continues on other rows")
def _() -> None:
    class Rows(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch["label"].float()[:, None].expand(-1, 4)).mean()

    def data() -> fp.TableDataModule:
        return fp.TableDataModule(train=fp.Table("flowers.parquet", columns=["label"]), batch_size=2)

    trainer().fit(Rows(), data())
    pq.write_table(pa.table({"label": [5, 6, 7, 8]}), "flowers.parquet")
    trainer(max_epochs=2).fit(Rows(), data(), ckpt_path="last")


@case("A function that can't be sent to other processes")
def _() -> None:
    lock = threading.Lock()
    fp.Runner(np=-2).run(lambda: lock)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", None)  # as if it weren't installed
    bounds = pa.array([{"left": 0}] * 4)
    pq.write_table(pa.table({"label": [0, 1, 2, 3], "height": [1, None, 2, 3], "bounds": bounds}), "flowers.parquet")


def test_every_section_has_its_case():
    assert list(SECTIONS) == list(CASES)


@pytest.mark.parametrize("heading", CASES)
def test_a_mistake_has_the_message_of_the_page(heading):
    with pytest.raises(fp.FootplateError) as raised:
        CASES[heading]()
    # A message may have ellipses of its own, which ".*" matches too.
    pattern = ".*".join(re.escape(part) for part in SECTIONS[heading].split("…"))
    assert re.fullmatch(pattern, str(raised.value), re.DOTALL), str(raised.value)
