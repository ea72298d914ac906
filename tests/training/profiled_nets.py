"""Networks whose lines have known costs, and readers of the files of their profiles."""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.autograd import _profiler_enabled  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
from torch.utils.data import DataLoader, Dataset

import footplate as fp
from footplate.training.profiler.regions import named_region

FILE = Path(__file__)


def line_of(marker: str) -> int:
    """The number of the line of this file that ends with a comment."""
    lines = enumerate(FILE.read_text().splitlines(), 1)
    (number,) = (number for number, text in lines if text.endswith(f"  # {marker}"))
    return number


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), index / 400)  # row


class Net(fp.Module):
    """A network whose lines have known costs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.weight = torch.nn.Parameter(torch.eye(64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        h = self.first(batch)  # call
        h = h @ self.weight  # matmul
        for _ in range(2):
            h = h * 1.5  # product
        with torch.no_grad():
            noise = torch.zeros(256, 1024)  # memory
        time.sleep(0.002)  # sleep
        with self.trainer.profiler.profile("the loss"):
            loss = (h**2).mean() + noise.sum()  # loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Wide(fp.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        h = self.layers(batch)  # layers
        return (h**2).mean()  # square

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Remember(fp.Callback):
    """Remembers the losses as hexadecimal floats, and calls a function after a step."""

    def __init__(self, step: int = -1, call: Any = None) -> None:
        self.losses: list[str] = []
        self._step, self._call = step, call

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(float(loss).hex())
        if trainer.global_step == self._step:
            self._call(trainer)


def batches() -> DataLoader[torch.Tensor]:
    return DataLoader(Rows(), batch_size=8)


def tables(path: Path) -> list[list[dict[str, str]]]:
    """The tables of a Markdown file, row by row, by the head of the column."""
    parsed: list[list[dict[str, str]]] = []
    for block in re.findall(r"(?:^\|.*\n)+", path.read_text(), re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line[2:-2].split(" | ")] for line in block.splitlines())
        parsed.append([dict(zip(head, row, strict=True)) for row in rows])
    return parsed


def ms(text: str) -> float:
    return float(text.replace(",", ""))


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def steps_in(path: Path) -> list[int]:
    """The numbers of the recorded steps of a trace."""
    names = (event["name"] for event in events(path) if event.get("ph") == "X")
    return sorted(int(name.removeprefix("ProfilerStep#")) for name in names if name.startswith("ProfilerStep#"))


def assert_nothing_is_left(trainer: Any, bare: bool = True) -> None:
    """Neither torch nor the trainer has anything of a profiler."""
    assert not _profiler_enabled()
    assert sys.getprofile() is None
    assert sys.gettrace() is None
    step = trainer.run.step
    assert not {"train", "evaluate", "forward", "backpropagate", "end_window"} & set(vars(step))
    assert step.bare is bare
    assert trainer.run.profiles.due == math.inf
    assert type(named_region("nothing")).__name__ == "nullcontext"
