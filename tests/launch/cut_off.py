"""A training that records its steps, so that an interrupted training can be compared with an uninterrupted one."""

from __future__ import annotations

import time
from pathlib import Path

from models.small import Classifier, loader

import footplate as fp
from footplate.launch import worker

STEPS = 36
# What each worker that trains would import for itself.
TRAINING = ("footplate.training.trainer", "footplate.distributed.ddp")


def train(directory: Path, pause_s: float) -> int:
    """Train in this directory, with a pause after each step; return the number of the last step. Each worker calls it."""

    class Steps(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            with Path(f"{directory}.{trainer.world.rank}.steps").open("a") as file:
                file.write(f"{worker.attempt()} {trainer.global_step} {float(outputs).hex()}\n")
            time.sleep(pause_s)

    fp.seed_everything(3)
    trainer = fp.Trainer(
        accelerator="cpu", seed=1, max_epochs=3, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=directory, callbacks=[Steps(), fp.ModelCheckpoint(every_n_train_steps=3)],
    )  # fmt: skip
    trainer.fit(Classifier(), loader(batch_size=5), ckpt_path="last")
    return trainer.global_step


def steps(directory: Path, rank: int) -> list[list[str]]:
    """Records of a rank: for each step the attempt, the number and the loss."""
    file = Path(f"{directory}.{rank}.steps")
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [line.split() for line in lines if line.endswith("\n")]


def assert_no_trace(whole: Path, cut: Path, ranks: int = 2, restarts: int = 1) -> None:
    """Assert that on all ranks, the first attempt and the last one have the losses of an uninterrupted training."""
    for rank in range(ranks):
        expected = {step: loss for _, step, loss in steps(whole, rank)}
        seen = steps(cut, rank)
        attempts = {attempt for attempt, _, _ in seen}
        assert {"0", str(restarts)} <= attempts <= {str(number) for number in range(restarts + 1)}
        # With half of the ranks, there are twice as many steps.
        assert len(expected) == 2 * STEPS // ranks
        assert {step: loss for _, step, loss in seen} == expected
        assert all(loss == expected[step] for _, step, loss in seen)
