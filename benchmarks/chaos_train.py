"""The training that `chaos.py` strikes, written as a user would write it, plus a journal.

    python chaos_train.py DIR RECIPE RANKS

It uses dropout, shuffled data, gradient accumulation, validation, a learning rate that changes with each step, a checkpoint
every few steps, and `ckpt_path="last"`. After every exit, the same command starts it again.

Each batch, validation and epoch of every attempt adds a line to `DIR/journal-RANK.log`, with values as hexadecimal floats.
`DIR/result.json` has the digest of the final weights, as seen by the process that called `fit`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from chaos_faults import Saboteur, move_clock
from torch import nn
from torch.utils.data import DataLoader, Dataset

import footplate as fp

# Each rank has 63 batches of 8 rows in each epoch. The last batch is smaller.
ROWS_EACH, BATCH, EPOCHS = 500, 8, 5
PAUSE_S = 0.006
HEARTBEAT_TIMEOUT_S = 3.0


class Classifier(fp.Module):
    """A classifier with dropout, which tests that random states are restored, and batch norm, which tests buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.ReLU(),
            nn.Linear(64, 4),
        )  # fmt: skip

    def loss(self, batch: Any) -> Any:
        x, y = (batch["x"], batch["label"]) if isinstance(batch, dict) else batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(PAUSE_S)
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Augmented(Dataset):
    """Adds noise to each sample, in the worker of the loader."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * torch.randn(16), self.y[index]


class Journal(fp.Callback):
    """Writes all values to compare. Each line is one write, so a killed process leaves only complete lines."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = -1

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        path = self._directory / f"journal-{trainer.global_rank}.log"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._note("start", 0, "")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self._note("batch", trainer.progress.batches, f"{float(outputs).hex()} {float(rate).hex()}")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._note("validation", trainer.progress.batches, float(trainer.callback_metrics["val_loss"]).hex())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        loss = float(trainer.callback_metrics["train_loss_epoch"])
        if trainer.progress.batch_idx >= trainer.num_training_batches:  # False if SIGTERM cut the epoch short
            self._note("epoch", trainer.progress.epoch, loss.hex())

    def _note(self, what: str, number: int, value: str) -> None:
        os.write(self._file, f"{os.getpid()} {time.monotonic():.6f} {what} {number} {value}\n".encode())


def numbers(rows: int, seed: int) -> tuple[Any, Any]:
    """`rows` random vectors, and a class that depends on each vector."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16, generator=generator)
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


def table(directory: Path, rows: int) -> Any:
    """The rows as a Parquet table, written at the first start."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = directory / "table.parquet"
    if not path.exists():
        x, y = numbers(rows, 0)
        columns = {"x": pa.array(x.tolist(), pa.list_(pa.float32(), 16)), "label": pa.array(y.tolist())}
        pq.write_table(pa.table(columns), path.with_suffix(".new"), row_group_size=100)
        path.with_suffix(".new").rename(path)
    return fp.Table(path)


def recipe(name: str, directory: Path, ranks: int) -> tuple[Any, dict[str, Any]]:
    """Training data and trainer arguments of a recipe."""
    if name == "table":
        data = fp.Loader(table(directory, ROWS_EACH * ranks), batch_size=BATCH, shuffle=True, seed=3, num_threads=1)
        return data, {"accumulate_grad_batches": 2, "val_check_interval": 25}
    data = DataLoader(Augmented(*numbers(ROWS_EACH * ranks, 0)), BATCH, shuffle=True, num_workers=1)
    return data, {"accumulate_grad_batches": 3, "val_check_interval": 21, "gradient_clip_val": 1.0}


def main(directory: Path, name: str, ranks: int) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    move_clock(directory)
    torch.manual_seed(7)
    model = Classifier()
    data, settings = recipe(name, directory, ranks)
    trainer = fp.Trainer(
        accelerator="cpu", devices=ranks, max_restarts=100_000, heartbeat_timeout=HEARTBEAT_TIMEOUT_S, seed=1,
        max_epochs=EPOCHS, default_root_dir=directory / "run", logger=False, log_every_n_steps=5,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Journal(directory), Saboteur(directory), fp.ModelCheckpoint(every_n_train_steps=4)], **settings,
    )  # fmt: skip
    trainer.fit(model, data, DataLoader(list(zip(*numbers(100, 1), strict=True)), 16), ckpt_path="last")
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(key.encode() + value.numpy().tobytes())
    result = {"weights": digest.hexdigest(), "val_loss": float(trainer.callback_metrics["val_loss"]).hex()}
    (directory / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
