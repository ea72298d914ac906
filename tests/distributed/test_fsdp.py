"""FSDP2: ranks with a shard of the model get the result of one process with the whole model."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from models import ranks
from models.small import dataset
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint.frozen_weights import TRAINED
from footplate.distributed.fsdp import repeated_blocks


class Deep(fp.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)])
        self.norm = nn.BatchNorm1d(16, momentum=0.0)
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(root, batch_size, epochs=2, strategy="fsdp", ckpt_path=None, **settings):
    torch.manual_seed(0)
    trainer = fp.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, seed=1, logger=False,
        default_root_dir=root, strategy=strategy, max_epochs=epochs, **settings,
    )  # fmt: skip
    model = Deep()
    trainer.fit(
        model,
        DataLoader(dataset(50), batch_size, shuffle=True),
        DataLoader(dataset(33), batch_size),
        ckpt_path=ckpt_path,
    )
    state = trainer.parallel.state_dict(model)
    sharded = sorted(name for name, value in state.items() if isinstance(value, DTensor))
    optimizer = get_optimizer_state_dict(model, trainer.optimizers)
    tested = trainer.validate(model, DataLoader(dataset(33), batch_size), verbose=False)
    return {
        "weights": trainer.parallel.whole(state),
        "sharded": sharded,
        "moments": sorted(optimizer["state"]),
        "val_loss": tested[0]["val_loss"],
        "name": type(model).__name__,
    }


def close(one, other):
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_repeated_blocks_of_a_model_are_units_of_their_own():
    model = Deep()
    assert list(repeated_blocks(model)) == list(model.blocks)


def test_a_sharded_model_learns_what_a_whole_one_learns(tmp_path):
    for settings in ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}):
        alone = train(tmp_path / "alone", 16, strategy="auto", **settings)
        first, second = ranks.run(lambda settings=settings: train(tmp_path / "two", 8, **settings), 2)
        close(alone["weights"], first["weights"])
        close(first["weights"], second["weights"])
        assert abs(first["val_loss"] - alone["val_loss"]) < 1e-5
        assert first["val_loss"] == second["val_loss"]
        assert "blocks.0.0.weight" in first["sharded"]
        assert first["moments"] == sorted(name for name, _ in Deep().named_parameters() if "norm" not in name)
        assert first["name"] == "Deep"


def test_a_checkpoint_of_a_sharded_model_is_one_of_the_whole_model(tmp_path):
    whole = ranks.run(lambda: train(tmp_path / "whole", 8, 4), 2)
    ranks.run(lambda: train(tmp_path / "cut", 8, 2), 2)
    newest = checkpoint.newest([tmp_path / "cut" / "checkpoints"])
    Deep().load_state_dict(checkpoint.load(newest)["state_dict"])

    rest = ranks.run(lambda: train(tmp_path / "cut", 8, 4, ckpt_path="last"), 2)
    for name, value in whole[0]["weights"].items():
        assert torch.equal(value, rest[0]["weights"][name]), name


def test_each_rank_averages_its_shards_and_a_resumed_run_continues_both(tmp_path):
    def averaged(name, batch_size, epochs, strategy="fsdp", ckpt_path=None):
        averaging = fp.EMAWeightAveraging(decay=0.8)
        return train(tmp_path / name, batch_size, epochs, strategy, ckpt_path, callbacks=[averaging])

    alone = averaged("alone", 16, 4, "auto")
    whole = ranks.run(lambda: averaged("whole", 8, 4), 2)
    close(alone["weights"], whole[0]["weights"])
    assert abs(whole[0]["val_loss"] - alone["val_loss"]) < 1e-5

    ranks.run(lambda: averaged("cut", 8, 2), 2)
    saved = checkpoint.load(checkpoint.newest([tmp_path / "cut" / "checkpoints"]))
    Deep().load_state_dict(saved["state_dict"])
    assert not torch.equal(saved["state_dict"]["last.weight"], saved[TRAINED]["last.weight"])
    rest = ranks.run(lambda: averaged("cut", 8, 4, ckpt_path="last"), 2)
    for name, value in whole[0]["weights"].items():
        assert torch.equal(value, rest[0]["weights"][name]), name


def test_validation_loaders_of_different_lengths_end_together(tmp_path):
    class Own:
        """Rank 1 has two batches more."""

        def __len__(self):
            return 3 + 2 * int(os.environ["RANK"])

        def __iter__(self):
            return iter([dataset(8).tensors] * len(self))

    def run():
        trainer = fp.Trainer(
            accelerator="cpu", strategy="fsdp", logger=False, enable_progress_bar=False, enable_model_summary=False,
            max_epochs=2, seed=1, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Deep(), DataLoader(dataset(50), 8), Own())
        return trainer.global_step, trainer.num_val_batches

    assert ranks.run(run, 2) == [(8, [3]), (8, [3])]
