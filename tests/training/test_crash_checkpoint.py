"""A failing run saves its state, so that nothing is lost while its author fixes the cause."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from models.small import Classifier, dataset, loader
from torch import nn
from torch.utils.data import DataLoader

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint.storage.local import LocalStore


class Mistake(Exception):
    pass


class Losses(fp.Callback):
    """Remembers every batch's loss; may fail before or after one of them, or in the middle of validation."""

    def __init__(
        self, fails_after: int = -1, fails_in_validation: bool = False, fails_before: int = -1, fails_at_end: int = -1
    ) -> None:
        self.fails_after, self.fails_in_validation = fails_after, fails_in_validation
        self.fails_before, self.fails_at_end = fails_before, fails_at_end
        self.seen: dict[int, str] = {}
        self.counted: list[tuple[float, float]] = []  # by epoch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.log("begun", 1.0, on_epoch=True, on_step=False, reduce_fx="sum")
        if trainer.progress.batches == self.fails_before:
            raise Mistake("before the step")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen[trainer.progress.batches] = float(outputs).hex()
        pl_module.log("ended", 1.0, on_epoch=True, on_step=False, reduce_fx="sum")
        if trainer.progress.batches == self.fails_after and not self.fails_in_validation:
            raise Mistake("in a callback")

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.progress.batches == self.fails_at_end:
            raise Mistake("at the end of an epoch")
        self.counted.append(tuple(float(trainer.callback_metrics[name]) for name in ("begun", "logged", "ended")))

    def on_validation_batch_end(self, trainer, *_: Any, **__: Any):
        if self.fails_in_validation and trainer.progress.batches >= self.fails_after >= 0:
            raise Mistake("in validation")


class FailsIn(Classifier):
    """Fails at batch 17 in some part of its step."""

    def __init__(self, part: str = "", norm: bool = False) -> None:
        super().__init__()
        self.part = part
        if norm:
            self.net = nn.Sequential(self.net, nn.BatchNorm1d(3))

    def training_step(self, batch, batch_idx):
        now = self.trainer.progress.batches == 17
        if now and self.part == "forward":
            raise Mistake("in the forward pass")
        loss = super().training_step(batch, batch_idx)
        self.log("logged", loss, on_epoch=True, on_step=False)
        if now and self.part == "after logging":
            raise Mistake("after logging")
        return Broken.apply(loss) if now and self.part == "backward" else loss

    def configure_optimizers(self):
        return BrokenAdamW(self) if self.part == "optimizer" else super().configure_optimizers()


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Mistake("in the backward pass")


class BrokenAdamW(torch.optim.AdamW):
    def __init__(self, module: FailsIn) -> None:
        super().__init__(module.parameters(), lr=1e-2)
        self.module = module

    def step(self, closure=None):
        if self.module.trainer.progress.batches == 17:
            raise Mistake("in the optimizer")
        return super().step(closure)


class FailingSet(torch.utils.data.Dataset):
    """A data set whose rows can't be read after a number of reads."""

    def __init__(self, fails_after: int | None) -> None:
        self.base, self.left = dataset(), fails_after

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Mistake("in the data")
        return self.base[index]


def saved_steps(root) -> list[int]:
    return sorted(checkpoint.read_meta(path)["global_step"] for path in root.rglob("*.ckpt") if not path.is_symlink())


def seeded(part: str = "") -> Classifier:
    torch.manual_seed(5)
    return FailsIn(part)


@pytest.mark.parametrize(
    "place", ["callback", "validation", "data", "forward", "after logging", "before the step", "epoch end"]
)
def test_the_continued_run_is_the_one_that_never_failed(place, make_trainer, tmp_path):
    def data(fails_after: int | None = None) -> DataLoader:
        return DataLoader(FailingSet(fails_after), 10, shuffle=True)

    def saver() -> fp.ModelCheckpoint:
        return fp.ModelCheckpoint(every_n_epochs=100)

    whole = Losses()
    make_trainer(callbacks=[whole, saver()], default_root_dir=tmp_path / "whole").fit(
        seeded(), data(), loader(shuffle=False)
    )

    fails = {
        "callback": (17,),
        "validation": (12, True),
        "before the step": (-1, False, 17),
        "epoch end": (-1, False, -1, 12),
    }
    first = Losses(*fails.get(place, ()))
    with pytest.raises(Mistake):
        make_trainer(callbacks=[first, saver()]).fit(
            seeded(place), data(170 if place == "data" else None), loader(shuffle=False)
        )
    assert saved_steps(tmp_path / "run") == [len(first.seen)]
    second = Losses()
    make_trainer(callbacks=[second, saver()]).fit(seeded(), data(), loader(shuffle=False), ckpt_path="last")

    assert first.seen.keys() | second.seen.keys() == whole.seen.keys()
    assert not first.seen.keys() & second.seen.keys()
    assert {**first.seen, **second.seen} == whole.seen
    assert first.counted + second.counted == whole.counted


def test_a_failed_forward_pass_is_saved_before_it_and_said_so(make_trainer, tmp_path, caplog):
    caplog.set_level("INFO")
    with pytest.raises(Mistake):
        make_trainer().fit(FailsIn("forward", norm=True), loader())
    assert 17 in saved_steps(tmp_path / "run")
    assert "Mistake after step 17: saved" in caplog.text
    assert "This checkpoint was saved after a step had failed" not in caplog.text

    make_trainer().fit(FailsIn(norm=True), loader(), ckpt_path="last")
    assert "This checkpoint was saved after a step had failed" in caplog.text


def test_a_loader_that_can_not_take_a_batch_back_leaves_the_newest_checkpoint(make_trainer, tmp_path, caplog):
    class KeepsItsPlace:
        def __init__(self):
            self.given = self.start = 0

        def __len__(self):
            return 12

        def __iter__(self):
            self.given, self.start = self.start, 0
            for batch in itertools.islice(loader(shuffle=False), self.given, None):
                self.given += 1
                yield batch

        def state_dict(self):
            return {"given": self.given}

        def load_state_dict(self, state):
            self.start = state["given"]

    with pytest.raises(Mistake):
        make_trainer().fit(FailsIn("forward"), KeepsItsPlace())
    assert saved_steps(tmp_path / "run") == [12]
    assert "KeepsItsPlace delivered a batch that was not trained on, and can't go back to it" in caplog.text
    again = make_trainer()
    again.fit(FailsIn(), KeepsItsPlace(), ckpt_path="last")
    assert again.global_step == 24


@pytest.mark.parametrize("part", ["backward", "optimizer"])
def test_half_changed_gradients_or_weights_are_not_saved(part, make_trainer, tmp_path):
    with pytest.raises(Mistake):
        make_trainer().fit(FailsIn(part), loader())
    assert saved_steps(tmp_path / "run") == [12]


def test_the_first_failure_is_the_one_that_is_shown_when_saving_fails_too(make_trainer, monkeypatch, caplog):
    def full(*_: Any):
        raise fp.CheckpointError("The disk is full.")

    monkeypatch.setattr(LocalStore, "write", full)
    with pytest.raises(Mistake):
        make_trainer(max_epochs=1).fit(FailsIn("forward"), loader(400))
    assert "could not be saved as it was when it failed: The disk is full." in caplog.text


def test_without_checkpoints_nothing_is_saved(make_trainer, tmp_path):
    with pytest.raises(Mistake):
        make_trainer(enable_checkpointing=False).fit(FailsIn("forward"), loader())
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end"])
def test_a_run_that_fails_in_a_hook_after_its_last_step_is_saved(hook, make_trainer, tmp_path):
    def fail(*_: Any) -> None:
        raise Mistake(hook)

    callback = fp.Callback()
    setattr(callback, hook, fail)
    saver = fp.ModelCheckpoint(every_n_epochs=100, save_last=False, save_on_exception=True)
    with pytest.raises(Mistake):
        make_trainer(callbacks=[callback, saver], max_epochs=1).fit(Classifier(), loader())
    assert saved_steps(tmp_path / "run") == [12]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: out of memory", True),
        ("something else", True),
    ],
)
def test_nothing_is_saved_from_a_gpu_that_can_not_be_read(text, kept, make_trainer, tmp_path):
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 7:
                raise RuntimeError(text)
            return super().training_step(batch, batch_idx)

    words = "A kernel on the GPU has refused a value" if "assert" in text else text.splitlines()[0]
    saver = fp.ModelCheckpoint(every_n_train_steps=5)
    with pytest.raises((RuntimeError, fp.DataError), match=words):
        make_trainer(callbacks=[saver]).fit(Fails(), loader())
    saved = {path.name for path in (tmp_path / "run").rglob("*.ckpt")}
    assert any("step=7" in name for name in saved) is kept, saved
