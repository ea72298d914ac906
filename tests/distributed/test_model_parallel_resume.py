"""Checkpoints of a grid of ranks: the same grid goes on bit for bit, and any other grid with equal weights."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from models import ranks
from models.gpt import Text
from safetensors.torch import load_file

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint import conversion

from .common import equal, same
from .test_model_parallel import TWO, train

# The sizes of a rank's batch on each number of groups, for global batches of 16 rows.
ROWS = {1: 16, 2: 8}


class KilledAfter(fp.Callback):
    """Kills one rank after a step, without a chance to save."""

    def __init__(self, step, rank):
        self.step, self.rank = step, rank

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


def saving():
    return fp.ModelCheckpoint(every_n_train_steps=1, save_last=True, save_top_k=-1)


def clipped(root, batch_size, strategy, epochs, path=None):
    return train(root, batch_size, strategy, epochs, path, gradient_clip_val=0.5, callbacks=[saving()])


class SavedInside(fp.Callback):
    """Saves after the third batch, inside a window of two batches."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            trainer.save_checkpoint(self.path)


def averaged(root, *callbacks, **arguments):
    """Train for two epochs of three steps: five batches, of which two make a step."""
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "dropout": 0.2}
    callbacks = [saving(), fp.EMAWeightAveraging(decay=0.8), *callbacks]
    return train(root, 4, epochs=2, callbacks=callbacks, **settings, **arguments)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """The directory of trainings of one grid of four ranks, and the results of its ranks. The ranks start once."""
    root = tmp_path_factory.mktemp("grid")

    def train_each():
        inside = SavedInside(root / "inside.ckpt")
        train(root / "inside", 4, TWO, accumulate_grad_batches=2, callbacks=[inside])
        return {"whole": averaged(root / "whole"), "saved": clipped(root / "saved", ROWS[2], TWO, 1)}

    return root, ranks.run(train_each, 4, timeout_s=300.0)


def test_a_killed_grid_goes_on_bit_for_bit(tmp_path, grid):
    """Rank 0 is killed, and another rank after the grid has gone on."""
    for step, rank in ((2, 0), (4, 3)):
        killed = KilledAfter(step, rank)
        with pytest.raises(AssertionError, match="rank"):
            ranks.run(lambda killed=killed: averaged(tmp_path, killed, ckpt_path="last"), 4)
        newest = checkpoint.newest([tmp_path / "checkpoints"])
        assert 0 < checkpoint.read_meta(newest)["global_step"] <= step

    rest = ranks.run(lambda: averaged(tmp_path, ckpt_path="last"), 4)
    for before, after in zip(grid[1], rest, strict=True):
        equal(before["whole"]["weights"], after["weights"])
        assert before["whole"]["metrics"] == after["metrics"]


def test_any_grid_goes_on_from_any_other(tmp_path, grid):
    root, _ = grid
    whole = clipped(tmp_path, 16, "auto", 6)

    def go_on(epochs, world, strategy, groups):
        def run():
            return clipped(root / "saved", ROWS[groups], strategy, epochs, "last")

        return run() if world == 1 else ranks.run(run, world)[0]

    # The first epoch was that of the grid.
    go_on(2, 2, "fsdp", 2)
    go_on(3, 1, "auto", 1)
    go_on(4, 2, TWO, 1)
    go_on(5, 2, "ddp", 2)
    same(whole["weights"], go_on(6, 4, TWO, 2)["weights"])


def test_a_window_that_was_begun_on_a_grid_ends_on_one_process(tmp_path, grid):
    def alone(name, path=None):
        return train(tmp_path / name, 8, "auto", 1, path, accumulate_grad_batches=2)

    same(alone("whole")["weights"], alone("rest", grid[0] / "inside.ckpt")["weights"])


def test_a_checkpoint_of_a_grid_is_one_of_the_whole_model(tmp_path, grid):
    root, of_ranks = grid
    weights = of_ranks[0]["saved"]["weights"]
    (path,) = (root / "saved" / "checkpoints").glob("*-step=3.ckpt")
    parts = [load_file(file)["state_dict.net.tokens.weight"] for file in sorted(path.glob("shard-*"))]
    assert [part.numel() for part in parts] == [weights["net.tokens.weight"].numel() // 4] * 4

    equal(weights, Text.load_from_checkpoint(path).state_dict())
    conversion.convert(path, tmp_path / "weights.safetensors")
    for name, value in load_file(tmp_path / "weights.safetensors").items():
        assert torch.equal(value, weights[name]), name
