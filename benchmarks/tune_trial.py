"""The program of a trial of `tune.py` with Footplate, in a package with the problem and the records.

    python -m trainer.tune_trial PLACE EPOCHS --lr=0.01 --width=64 --weight_decay=1e-4 --job-dir DIR

It saves and ends when it is paused, and continues from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import footplate as fp

from . import tune_problem as problem
from . import tune_records as records


class Classifier(fp.Module):
    """The problem's network, trained by a trainer.

    Args:
        tried: the hyperparameters.
        place: the directory of the records.
        trial: the trial's number.
    """

    def __init__(self, tried: problem.Hyperparameters, place: Path, trial: int) -> None:
        super().__init__()
        self.net = problem.network(tried.width)
        self.tried, self.place, self.trial = tried, place, trial

    def training_step(self, batch: problem.Batch, batch_idx: int) -> torch.Tensor:
        return problem.loss(self.net, batch)

    def validation_step(self, batch: problem.Batch, batch_idx: int) -> None:
        score = problem.score(self.net, batch)
        self.log("score", score)
        records.write(self.place, self.trial, "score", score)

    def configure_optimizers(self) -> Any:
        return problem.optimizer(self.net, self.tried)


def train(tried: problem.Hyperparameters, place: Path, epochs: int, job_dir: str) -> None:
    """Train from the beginning, or from where the trial was paused."""
    trial = int(os.environ["CLOUD_ML_TRIAL_ID"])
    records.write(place, trial, "began")
    torch.set_num_threads(1)
    fp.seed_everything(0)
    batches = problem.loader(problem.Rows(place / problem.TRAIN))
    validation = problem.Rows(place / problem.VALIDATION)
    whole = DataLoader(validation, batch_size=len(validation), collate_fn=tuple)
    trainer = fp.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, default_root_dir=job_dir,
    )  # fmt: skip
    trainer.fit(Classifier(tried, place, trial), batches, whole, ckpt_path="last")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("place", type=Path)
    parser.add_argument("epochs", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--width", type=int)
    parser.add_argument("--weight_decay", type=float)
    parser.add_argument("--job-dir")
    given = parser.parse_args()
    tried = problem.Hyperparameters(given.lr, given.width, given.weight_decay)
    train(tried, given.place, given.epochs, given.job_dir)


if __name__ == "__main__":
    main()
