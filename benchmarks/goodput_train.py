"""The training of `goodput.py`: a tiny network, whose steps are counted and timed by the program itself.

    python -m trainer.goodput_train STEPS PLACE --job-dir DIR

It appends a line to `PLACE/steps-ATTEMPT` for each step: the step, its begin and its end in seconds since the epoch. Each
attempt has its own file, since a process that is killed can leave half a line at the end of a page of the file.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp

STEP_S = 0.02
CHECKPOINT_EVERY = 40


class Counted(fp.Module):
    def __init__(self, place: Path) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 2)
        file = place / f"steps-{os.environ['FOOTPLATE_JOB_ATTEMPT']}"
        self.file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.began = time.time()
        time.sleep(STEP_S)
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        line = f"{self.trainer.global_step} {self.began} {time.time()}\n"
        os.write(self.file, line.encode())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(STEP_S)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    steps, place = int(sys.argv[1]), Path(sys.argv[2])
    rows = TensorDataset(torch.arange(1600.0).reshape(400, 4))
    trainer = fp.Trainer(
        max_steps=steps, max_epochs=-1, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=10, callbacks=[fp.ModelCheckpoint(every_n_train_steps=CHECKPOINT_EVERY)],
    )  # fmt: skip
    loader, validation = DataLoader(rows, 4, shuffle=True), DataLoader(TensorDataset(torch.zeros(20, 4)), 4)
    trainer.fit(Counted(place), loader, validation, ckpt_path="last")


if __name__ == "__main__":
    main()
