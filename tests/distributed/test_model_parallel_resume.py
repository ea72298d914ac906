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


def test_a_killed_grid_goes_on_bit_for_bit(tmp_path):
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "dropout": 0.2}

    def run(name, *callbacks, **arguments):
        averaging = fp.EMAWeightAveraging(decay=0.8)
        return train(tmp_path / name, 4, epochs=2, callbacks=[saving(), averaging, *callbacks], **settings, **arguments)

    whole = ranks.run(lambda: run("whole"), 4)
    for rank in (0, 3):
        cut = f"cut by {rank}"
        with pytest.raises(AssertionError, match="rank"):
            ranks.run(lambda cut=cut, rank=rank: run(cut, KilledAfter(5, rank)), 4)
        newest = checkpoint.newest([tmp_path / cut / "checkpoints"])
        assert 0 < checkpoint.read_meta(newest)["global_step"] <= 5

        for before, after in zip(whole, ranks.run(lambda cut=cut: run(cut, ckpt_path="last"), 4), strict=True):
            equal(before["weights"], after["weights"])
            assert before["metrics"] == after["metrics"]


def test_any_grid_goes_on_from_any_other(tmp_path):
    whole = train(tmp_path / "whole", 16, "auto", epochs=6, gradient_clip_val=0.5)

    def go_on(epochs, world, strategy, groups):
        def run():
            path = None if epochs == 1 else "last"
            return train(
                tmp_path / "moving", ROWS[groups], strategy, epochs, path, gradient_clip_val=0.5, callbacks=[saving()]
            )

        return run() if world == 1 else ranks.run(run, world)[0]

    go_on(1, 4, TWO, 2)
    go_on(2, 2, "fsdp", 2)
    go_on(3, 1, "auto", 1)
    go_on(4, 2, TWO, 1)
    go_on(5, 2, "ddp", 2)
    same(whole["weights"], go_on(6, 4, TWO, 2)["weights"])


def test_a_window_that_was_begun_on_a_grid_ends_on_one_process(tmp_path):
    # Six steps of two batches; a checkpoint is made after three batches.
    def run(batch_size, strategy, path=None, **settings):
        return train(tmp_path / "run", batch_size, strategy, 1, path, accumulate_grad_batches=2, **settings)

    whole = train(tmp_path / "whole", 8, "auto", 1, accumulate_grad_batches=2)

    class SavedInside(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    ranks.run(lambda: run(4, TWO, callbacks=[SavedInside()]), 4)
    same(whole["weights"], run(8, "auto", tmp_path / "inside.ckpt")["weights"])


def test_a_checkpoint_of_a_grid_is_one_of_the_whole_model(tmp_path):
    ended = ranks.run(lambda: train(tmp_path / "run", 8, epochs=1, callbacks=[saving()]), 4)
    path = checkpoint.newest([tmp_path / "run" / "checkpoints"])
    parts = [load_file(file)["state_dict.net.tokens.weight"] for file in sorted(path.glob("shard-*"))]
    assert [part.numel() for part in parts] == [ended[0]["weights"]["net.tokens.weight"].numel() // 4] * 4

    equal(ended[0]["weights"], Text.load_from_checkpoint(path).state_dict())
    conversion.convert(path, tmp_path / "weights.safetensors")
    exported = load_file(tmp_path / "weights.safetensors")
    for name, value in exported.items():
        assert torch.equal(value, ended[0]["weights"][name]), name
