"""Tests of CUDA, for a machine with a GPU: `make gpu`. Elsewhere this folder is not collected.

The cases of exact resume and of precisions are those of the CPU, run again with this folder's trainers.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from models.small import Classifier, loader
from step.test_precision import (  # noqa: F401  collected here, too
    test_it_learns_and_resumes_in_every_precision,
    test_training_and_evaluation_are_done_in_these_types,
)
from training.test_resume import (  # noqa: F401
    test_a_run_that_was_cut_off_is_bit_for_bit_the_run_that_was_not,
)

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint.format.statefile import Snapshot
from footplate.hardware.transfer import to_device
from footplate.launch import launch


class Where(Classifier):
    """Remembers the devices that it was trained on, and predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.trained_on: set[str] = set()

    def training_step(self, batch, batch_idx):
        self.trained_on.add(self.device.type)
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_checkpoint_continues_on_another_kind_of_device(first, then, make_trainer):
    saver = fp.ModelCheckpoint(every_n_train_steps=5)
    make_trainer(accelerator=first, max_epochs=1, callbacks=[saver]).fit(Classifier(), loader())
    state = checkpoint.load(saver.last_model_path)
    assert all(not tensor.is_cuda for tensor in state["state_dict"].values())
    where, runner = Where(), make_trainer(accelerator=then)
    runner.fit(where, loader(), ckpt_path="last")
    assert where.trained_on == {then}
    assert runner.global_step == 24


def test_after_a_call_module_optimizer_and_predictions_are_on_the_cpu(make_trainer):
    """As in Lightning, whose programs go on with `module(x)`."""
    runner, module = make_trainer(), Where()
    runner.fit(module, loader())
    assert module.trained_on == {"cuda"}
    state = [value for state in runner.optimizers[0].state.values() for value in state.values()]
    assert not any(tensor.is_cuda for tensor in (*module.parameters(), *module.buffers(), *state))
    predictions = runner.predict(module, loader(30, shuffle=False))
    assert not any(each.is_cuda for each in predictions)
    runner.fit(module, loader())
    assert module(next(iter(loader()))[0]).shape == (10, 3)


def test_a_snapshot_is_taken_into_page_locked_memory_and_is_the_state_at_the_call():
    writer = Snapshot()
    weights = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    frozen = writer.take({"state_dict": {"w": weights}})
    weights.zero_()
    torch.cuda.synchronize()
    assert frozen.data.is_pinned()
    assert torch.equal(frozen.data.view(torch.float32), torch.arange(1 << 20, dtype=torch.float32))


def train_on_cuda() -> float:
    runner = fp.Trainer(
        accelerator="cuda", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, seed=1,
    )  # fmt: skip
    runner.fit(Classifier(), loader())
    return float(runner.callback_metrics["train_loss"])


def test_a_process_that_was_forked_by_the_supervisor_can_use_the_device():
    assert launch(train_on_cuda, world_size=1, preload=("footplate.training.trainer",)) > 0


def test_all_devices_train_together(make_trainer):
    """NCCL; with a single GPU, a world of one."""
    runner = make_trainer(devices=torch.cuda.device_count(), max_epochs=1)
    runner.fit(Classifier(), loader())
    assert runner.global_step == 12 // torch.cuda.device_count() + (12 % torch.cuda.device_count() > 0)


def test_a_copy_to_the_cpu_is_complete_when_it_is_read():
    for size in (1 << 10, 1 << 22):
        value = torch.zeros(size, device="cuda")
        torch.cuda._sleep(100_000_000)  # so that what follows waits in the queue
        value += 1
        found = to_device({"x": value}, torch.device("cpu"))["x"]
        assert bool((found == 1).all())


def test_the_trainers_device_is_that_of_the_process(make_trainer):
    last = torch.cuda.device_count() - 1

    class Looks(Classifier):
        def training_step(self, batch, batch_idx):
            assert torch.ones((), device="cuda").device == self.device
            return super().training_step(batch, batch_idx)

    try:
        make_trainer(devices=[last], max_epochs=1).fit(Looks(), loader())
        assert torch.cuda.current_device() == last
    finally:
        torch.cuda.set_device(0)


class DrawsInValidation(Classifier):
    """Draws on the device in validation; may be stopped between a step and the validation that follows."""

    stops_at = -1

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[int, float] = {}

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        if self.trainer.progress.batches == self.stops_at:
            raise OSError("the disk is gone")

    def validation_step(self, batch, batch_idx) -> None:
        self.drawn[self.trainer.progress.batches] = float(torch.rand((), device=self.device))


def test_a_validation_that_is_repeated_draws_the_same_on_the_device(make_trainer, tmp_path):
    whole, cut, again = DrawsInValidation(), DrawsInValidation(), DrawsInValidation()
    settings = {"val_check_interval": 6, "num_sanity_val_steps": 0, "max_epochs": 1}
    make_trainer(**settings, default_root_dir=tmp_path / "whole").fit(whole, loader(), loader(10))
    cut.stops_at = 6
    with pytest.raises(OSError, match="gone"):
        make_trainer(**settings).fit(cut, loader(), loader(10))
    make_trainer(**settings).fit(again, loader(), loader(10), ckpt_path="last")
    assert again.drawn == whole.drawn


def test_the_generator_is_found_before_cuda_has_started():
    program = """
import torch
from footplate.core import rng
rng.device_seeder(torch.device("cuda", 0))(5)
print(torch.cuda.initial_seed())
"""
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
        == "5"
    )
