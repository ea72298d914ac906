"""A training for the lab: dropout, shuffling, a schedule, a checkpoint each five steps. Its losses are the proof.

    python lab_train.py DIRECTORY PAUSE_S [EPOCHS]

Each rank writes a line for each of its steps, with the loss in all bits, to `DIRECTORY/rank-N.jsonl`. The training ends
early if there is a file `DIRECTORY/enough`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp

ROWS, BATCH = 96, 6


class Net(fp.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs), targets)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Journal(fp.Callback):
    """Writes a line for each step of each rank: `{"step": 1, "loss": "0x1.1…", "time": 1764066000.0, "pid": 7, …}`."""

    def __init__(self, directory: Path, pause_s: float) -> None:
        self._enough = directory / "enough"
        self._file = directory / f"rank-{os.environ.get('RANK', '0')}.jsonl"
        self._pause_s = pause_s

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        line = {
            "step": trainer.global_step, "loss": float(outputs).hex(), "time": time.time(),
            "machine": socket.gethostname(), "pid": os.getpid(),
        }  # fmt: skip
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._enough.exists():
            trainer.should_stop = True
        time.sleep(self._pause_s)


def train(
    directory: Path,
    pause_s: float,
    epochs: int,
    root: str | Path | None = None,
    dirpath: str | None = None,
    num_nodes: int = 1,
) -> None:
    """Train; write a rank's losses to `directory`.

    Args:
        directory: of the losses.
        pause_s: the pause after each step.
        epochs: how many.
        root: the run's directory; by default `directory/run`.
        dirpath: of the checkpoints; by default in the run's directory.
        num_nodes: the number of machines, if `devices` counts those of one machine.
    """
    fp.seed_everything(3)
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, 8, generator=generator)
    targets = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    trainer = fp.Trainer(
        accelerator="cpu", devices="auto", max_epochs=epochs, seed=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=root or directory / "run", num_nodes=num_nodes,
        callbacks=[Journal(directory, pause_s), fp.ModelCheckpoint(dirpath=dirpath, every_n_train_steps=5)],
    )  # fmt: skip
    loader = DataLoader(TensorDataset(inputs, targets), BATCH, shuffle=True)
    trainer.fit(Net(), loader, ckpt_path="last")
    print(f"trained to step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    train(Path(sys.argv[1]), float(sys.argv[2]), int((*sys.argv, "3")[3]))
