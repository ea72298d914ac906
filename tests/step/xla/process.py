"""One of the processes of `test_trainer_processes.py`. Its argument, a JSON object, describes the training."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models.small import dataset, loader
from torch import nn

import footplate as fp
from footplate.checkpoint import is_complete
from footplate.launch import worker
from step.xla.trained import Steady


class Drawing(Steady):
    """A module with layers that are large enough to shard, metrics of each kind, and optionally dropout and BatchNorm."""

    def __init__(self, draws: bool = True) -> None:
        super().__init__()
        normal, drop = (nn.BatchNorm1d(256), nn.Dropout(0.2)) if draws else (nn.Identity(), nn.Identity())
        self.net = nn.Sequential(nn.Linear(8, 256), normal, nn.Tanh(), drop, nn.Linear(256, 256), nn.Linear(256, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("rows", torch.ones_like(batch[1]).sum().double(), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("most", batch[0].max(), on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Looks(fp.Callback):
    """Reads the weights at each validation batch. The processes have different numbers of these batches."""

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen = float(sum(parameter.sum() for parameter in pl_module.parameters()))


class Stops(fp.Callback):
    """Stops the second process by a signal after its first batch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Dies(fp.Callback):
    """Kills the first process in its second epoch, once, when the checkpoint of the first is complete."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        print(f"begins at step {trainer.global_step}", flush=True)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.world.rank == 0 and trainer.global_step == 7 and worker.attempt() == 0:
            # A thread writes it.
            while not any(map(is_complete, Path(trainer.default_root_dir).rglob("*.ckpt"))):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


class Raises(fp.Callback):
    """Raises an error in the second process, before its third batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.world.rank == 1 and batch_idx == 2:
            raise RuntimeError("no such thing here")


class Own:
    """Batches that can't be sharded."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def data(kind: str, rows: int, size: int, rank: int) -> Any:
    """A loader that is sharded, or separate batches for each rank: rank 0 has more of them, or wider ones."""
    if kind == "shared":
        return loader(rows, size, shuffle=False)
    x, y = dataset(rows).tensors
    if kind == "wider" and rank == 0:
        x = torch.cat([x, x], 1)
    batches = list(zip(x.split(size), y.split(size), strict=True))
    return Own(batches if kind == "wider" or rank == 0 else batches[1:2])


def main(asked: dict[str, Any]) -> None:
    rank = fp.Trainer(accelerator="cpu", max_epochs=1).world.rank
    torch.manual_seed(rank)  # each rank begins with different weights
    model = Steady() if asked["model"] == "steady" else Drawing(asked["model"] == "drawing")
    callbacks = [kind() for kind in (Looks, Stops, Dies, Raises) if asked[kind.__name__.lower()]]
    trainer = fp.Trainer(
        precision="64-true", seed=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=0.5, callbacks=callbacks, **asked["trainer"],
    )  # fmt: skip
    train, val = (data(kind, rows, asked["size"], rank) for kind, rows in (asked["train"], asked["val"]))
    try:
        trainer.fit(model, train, val, ckpt_path="last")
    except fp.FootplateError as error:
        print(error)
        raise SystemExit(3) from None
    print(json.dumps({name: float(value) for name, value in sorted(trainer.callback_metrics.items())}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
