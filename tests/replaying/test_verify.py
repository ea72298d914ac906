"""`fp.verify` trains a stretch again, and names the first checkpoint whose state differs."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint.format import statefile
from replaying.programs import ROWS, Seeing, columns, seeing, trainer

TABLE = fp.Table(columns(0, ROWS))


def loader(batch_size: int = 12) -> fp.Loader:
    return fp.Loader(TABLE, batch_size, shuffle=True, seed=4)


class FlippedBit(fp.Callback):
    """A machine that flips one bit of a weight after a step."""

    def __init__(self, step: int, name: str, index: int, bit: int) -> None:
        self.step, self.name, self.index, self.bit = step, name, index, bit

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step and trainer.progress.batches:
            weight = pl_module.get_parameter(self.name).detach().view(-1).view(torch.int32)
            weight[self.index] ^= -(2**31) if self.bit == 31 else 1 << self.bit


def test_equal_states_are_the_same_at_every_moment_of_a_save(tmp_path):
    """Checkpoints by step, by time, after a validation, at the end of an epoch and at the end of training."""

    def program() -> tuple[fp.Trainer, Seeing, fp.Loader, fp.Loader]:
        savers = [
            fp.ModelCheckpoint(filename="epoch-{step}", save_top_k=-1, save_on_train_epoch_end=True),
            fp.ModelCheckpoint(filename="validated-{step}", save_top_k=-1, save_on_train_epoch_end=False),
            fp.ModelCheckpoint(filename="timed-{step}", save_top_k=-1, train_time_interval=timedelta(seconds=0.001)),
            fp.EMAWeightAveraging(),
        ]
        settings = {"accumulate_grad_batches": 2, "val_check_interval": 5, "max_steps": 17, "callbacks": savers}
        return trainer(tmp_path, save_every=4, **settings), seeing(), loader(), loader()

    began, *rest = program()
    began.fit(*rest)
    whole = fp.verify(tmp_path, 0, None, *program())
    assert (whole.checkpoint, whole.first_step, whole.difference, whole.steps) == (None, 0, None, None)
    names = [Path(compared.path).name for compared in whole.compared]
    assert len(names) == len(list((tmp_path / "checkpoints").glob("*=*.ckpt"))) > 12
    assert {name.partition("-")[0] for name in names} == {
        "epoch",
        "epoch=0",
        "epoch=1",
        "epoch=2",
        "validated",
        "timed",
    }

    part = fp.verify(tmp_path, 8, 12, *program())
    assert part.first_step == 8
    assert {compared.step for compared in part.compared} == set(range(9, 13))


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_is_located(tmp_path, seed):
    g = np.random.default_rng(seed)
    module = seeing()
    names = {name: parameter.numel() for name, parameter in module.named_parameters()}
    name = str(g.choice([*names]))
    step = int(g.integers(1, 35))
    flip = FlippedBit(step, name, int(g.integers(names[name])), int(g.integers(32)))
    trainer(tmp_path, callbacks=[flip]).fit(module, loader())

    verdict = fp.verify(tmp_path, 0, None, trainer(tmp_path), seeing(), loader())
    assert verdict.steps is not None
    assert verdict.difference is not None
    first, last = verdict.steps
    assert first <= step + 1 <= last == verdict.difference.step
    assert last - first < 5
    assert any(name in line for line in verdict.difference.differing)
    assert len(verdict.compared) + len(verdict.skipped) == len(list((tmp_path / "checkpoints").glob("epoch*.ckpt")))


def test_another_learning_rate_differs_too(tmp_path):
    class Hurrying(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 10:
                trainer.optimizers[0].param_groups[0]["lr"] *= 2

    trainer(tmp_path, callbacks=[Hurrying()], max_steps=10).fit(seeing(), loader())
    verdict = fp.verify(tmp_path, 0, None, trainer(tmp_path), seeing(), loader())
    assert verdict.steps == (6, 10)
    assert verdict.difference is not None
    assert verdict.difference.differing == []


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_ranks_compare_their_parts(tmp_path, strategy):
    class Plain(Seeing):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def program(*callbacks: fp.Callback) -> tuple[fp.Trainer, Seeing, fp.Loader]:
        torch.manual_seed(3)
        settings = {"devices": 2, "strategy": strategy, "max_epochs": 1}
        return trainer(tmp_path, callbacks=[*callbacks], **settings), Plain(), loader(10)

    class Hurrying(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 6:
                for parameter in pl_module.parameters():
                    torch.nn.Module.zero_grad(pl_module)
                    with torch.no_grad():
                        parameter.mul_(2)

    began, *rest = program(Hurrying())
    began.fit(*rest)
    verdict = fp.verify(tmp_path, 5, None, *program())
    assert verdict.steps == (6, 8)
    assert verdict.difference is not None
    assert {line.partition(" of ")[0] for line in verdict.difference.differing} >= {"state_dict.net.weight"}
    if strategy == "fsdp":
        replayed = fp.replay(tmp_path, 7, *program())
        assert {name: tuple(value.shape) for name, value in replayed.gradients.items()} == {
            "net.weight": (1, 2),
            "net.bias": (1,),
        }


def test_the_hash_counts_only_what_training_continues_with(tmp_path):
    trainer(tmp_path / "a", max_steps=7).fit(seeing(), loader())
    trainer(tmp_path / "b", max_steps=7, save_every=7, logger=False).fit(seeing(), loader())
    a, b = ((tmp_path / run / "checkpoints" / "epoch=0-step=7.ckpt") for run in "ab")
    assert checkpoint.read_meta(a)["state_hash"] == checkpoint.read_meta(b)["state_hash"]
    assert checkpoint.read_meta(a)["files"] != checkpoint.read_meta(b)["files"]

    with (a / checkpoint.STATE).open("rb") as file:
        outline = statefile.outline(file, (a / checkpoint.STATE).stat().st_size, str(a))
    assert outline.checksums.keys() == outline.tensors.keys()


def test_mistakes_are_one_clear_error(tmp_path):
    def program() -> tuple[fp.Trainer, Seeing, fp.Loader]:
        return trainer(tmp_path, max_epochs=1), seeing(), loader()

    began, *rest = program()
    began.fit(*rest)
    with pytest.raises(fp.ConfigError, match=r"no checkpoint to compare in this stretch.* steps 5, 10, 13"):
        fp.verify(tmp_path, 13, None, *program())
    with pytest.raises(fp.ConfigError, match="expected a later step"):
        fp.verify(tmp_path, 10, 10, *program())
    with pytest.raises(fp.ConfigError, match="first=-1: expected a step"):
        fp.verify(tmp_path, -1, None, *program())
    with pytest.raises(fp.ConfigError, match=r"ended at step 7, before .*step=10"):
        fp.verify(tmp_path, 5, None, trainer(tmp_path, max_steps=7), seeing(), loader())
    torch.manual_seed(4)
    with pytest.raises(fp.ConfigError, match="others than those that the run began with"):
        fp.verify(tmp_path, 0, None, trainer(tmp_path), Seeing(), loader())

    for path in (tmp_path / "checkpoints").glob("epoch*.ckpt"):
        meta = json.loads((path / checkpoint.META).read_text())
        del meta["state_hash"]
        (path / checkpoint.META).write_text(json.dumps(meta))
    with pytest.raises(fp.ConfigError, match="no hash of their state"):
        fp.verify(tmp_path, 5, None, *program())
