"""Exact resume: an interrupted and resumed run equals an uninterrupted run bit for bit.

Each case trains to the end without a break. Then it trains again, with an exception at some batch. Nothing is saved at that
moment, so only earlier checkpoints exist. It resumes in a new trainer with new objects, and compares every loss, as
hexadecimal floats, and the final weights.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import template
import torch
import torch.nn.functional as F
from models.small import Classifier, dataset, loader
from torch.utils.data import DataLoader, Dataset

import footplate as fp


class Recorder(fp.Callback):
    """Remembers every batch's loss, learning rate and labels. It may interrupt the run."""

    def __init__(self, cut_at: int | None = None, in_validation: bool = False) -> None:
        self.cut_at, self.in_validation = cut_at, in_validation
        self.seen: dict[int, tuple[str, float, list[int]]] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        labels = batch["label"] if isinstance(batch, dict) else batch[1]
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen[trainer.progress.batches] = (float(loss).hex(), lr, labels.tolist())
        if trainer.progress.batches == self.cut_at and not self.in_validation:
            raise PowerCut

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if self.in_validation and self.cut_at is not None and trainer.progress.batches >= self.cut_at:
            raise PowerCut


class PowerCut(BaseException):
    """Not an `Exception`, because the trainer saves a run before it passes on an `Exception`."""


class Augmented(Dataset):
    """Draws from all three global generators for every sample."""

    def __init__(self) -> None:
        self.base = dataset()

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        x, y = self.base[index]
        return x + 0.1 * torch.randn(8) + random.random() + float(np.random.rand()), y


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plateau(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


class TwoOptimizers(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        optimizer = first if batch_idx % 2 else second
        loss = F.cross_entropy(self(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def configure_optimizers(self):
        return [torch.optim.Adam(self.net[0].parameters()), torch.optim.SGD(self.net[3].parameters(), lr=0.1)]


class Mixup(Classifier):
    """Draws from Python's and NumPy's global generators in the step itself."""

    def training_step(self, batch, batch_idx):
        weight = float(np.random.beta(0.4, 0.4)) * random.random()
        x = weight * batch[0] + (1 - weight) * batch[0].flip(0)
        return F.cross_entropy(self(x), batch[1])


class AugmentsOnDevice(Classifier):
    """Draws from torch's generator for each batch, once it is on the device."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (x + 0.1 * torch.randn_like(x), y) if self.training else batch


class OnTable(Classifier):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch["x"], batch["label"]


def table_loader() -> fp.Loader:
    x, label = dataset().tensors
    rows = pa.table({"x": pa.FixedSizeListArray.from_arrays(x.flatten().numpy(), 8), "label": label.numpy()})
    return fp.Loader(fp.Table(rows), 10, shuffle=True, seed=3)


CASES: dict[str, dict[str, Any]] = {
    "dropout and shuffling": {},
    "learning rate by step": {"module": Scheduled},
    "learning rate by plateau": {"module": Plateau, "every": {"every_n_epochs": 1}, "cut_at": 30},
    "accumulation, cut inside a window": {"trainer": {"accumulate_grad_batches": 4}, "cut_at": 23},
    "accumulation, saved inside a window": {
        "trainer": {"accumulate_grad_batches": 4, "val_check_interval": 5},
        "every": {"every_n_epochs": 1},
        "cut_at": 19,
    },
    "validation in mid-epoch": {"trainer": {"val_check_interval": 5}, "every": {"every_n_epochs": 1}, "cut_at": 18},
    "cut inside validation": {"trainer": {"val_check_interval": 5}, "cut_at": 20, "in_validation": True},
    "saved at the very batch that validation follows": {
        "trainer": {"val_check_interval": 5},
        "every": {"every_n_train_steps": 5},
        "module": Plateau,
        "cut_at": 20,
        "in_validation": True,
    },
    "one loader to train on and to validate on in mid-epoch": {
        "module": OnTable,
        "data": table_loader,
        "validates_on_it": True,
        "trainer": {"val_check_interval": 5, "limit_val_batches": 2},
        "every": {"every_n_epochs": 1},
        "cut_at": 18,
    },
    "two optimizers by hand": {"module": TwoOptimizers},
    "python and numpy in the step": {"module": Mixup},
    "augmentation on the device": {"module": AugmentsOnDevice},
    "augmentation in this process": {"data": lambda: DataLoader(Augmented(), 10, shuffle=True)},
    "augmentation in workers": {"data": lambda: DataLoader(Augmented(), 10, shuffle=True, num_workers=2)},
    "a list of batches": {"data": lambda: list(loader(shuffle=False))},
    "weighted sampling": {
        "data": lambda: DataLoader(
            dataset(), 10, sampler=torch.utils.data.WeightedRandomSampler(torch.arange(120.0), 120)
        )
    },
}


def run(make_trainer, case: dict[str, Any], recorder: Recorder, ckpt_path: str | None, root: Path) -> Any:
    module = case.get("module", Classifier)
    torch.manual_seed(7)
    model = module()
    saver = fp.ModelCheckpoint(**case.get("every", {"every_n_train_steps": 4}))
    data = case.get("data", loader)()
    make = make_trainer(callbacks=[recorder, saver], max_epochs=4, default_root_dir=root, **case.get("trainer", {}))
    held_out = data if case.get("validates_on_it") else loader(40, shuffle=False)
    make.fit(model, data, held_out, ckpt_path=ckpt_path)
    return model, make


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_was_cut_off_is_bit_for_bit_the_run_that_was_not(name, make_trainer, tmp_path):
    case = CASES[name]
    whole = Recorder()
    expected, unbroken = run(make_trainer, case, whole, None, tmp_path / "whole")

    cut = Recorder(case.get("cut_at", 26), case.get("in_validation", False))
    with pytest.raises(PowerCut):
        run(make_trainer, case, cut, None, tmp_path / "cut")
    rest = Recorder()
    model, resumed = run(make_trainer, case, rest, "last", tmp_path / "cut")

    assert min(rest.seen) > 1, "it began anew instead of continuing"
    assert {**cut.seen, **rest.seen} == whole.seen
    for key, value in expected.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
    assert resumed.callback_metrics == unbroken.callback_metrics


SCRIPT = """
    import sys, torch
    sys.path.insert(0, {tests!r})
    from models.small import Classifier, loader
    import footplate as fp

    class Slow(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            print(trainer.progress.batches, float(outputs).hex(), flush=True)
            torch.utils.data.get_worker_info()
            if {pause}:
                import time; time.sleep(0.02)

    torch.manual_seed(7)
    trainer = fp.Trainer(accelerator="cpu", default_root_dir=sys.argv[1], logger=False, enable_progress_bar=False,
                         enable_model_summary=False, seed=1, max_epochs=8,
                         callbacks=[Slow(), fp.ModelCheckpoint(every_n_train_steps=5)])
    trainer.fit(Classifier(), loader(), ckpt_path="last")
    print("done", flush=True)
"""


def write_script(directory: Path, pause: bool) -> Path:
    script = directory / f"pause-{pause}.py"
    script.write_text(textwrap.dedent(SCRIPT.format(tests=str(Path(__file__).parents[1]), pause=pause)))
    return script


def start(script: Path, root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, script, root]
    return template.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines_of(script: Path, root: Path) -> list[str]:
    with start(script, root) as process:
        return process.communicate(timeout=300)[0].splitlines()


def losses(lines: list[str]) -> dict[int, str]:
    pairs = (line.split() for line in lines if line[:1].isdigit())
    return {int(number): value for number, value in pairs}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> list[str]:
    """The lines of the script that nothing interrupts."""
    directory = tmp_path_factory.mktemp("whole")
    return lines_of(write_script(directory, pause=False), directory / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_a_killed_process_continues_where_it_was(number, code, whole, tmp_path):
    assert whole[-1] == "done"

    process = start(write_script(tmp_path, pause=True), tmp_path / "killed")
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line.strip())
        if line.startswith("33 "):
            os.kill(process.pid, number)
            break
    seen += process.communicate()[0].splitlines()
    assert process.returncode == code

    rest = lines_of(write_script(tmp_path, pause=False), tmp_path / "killed")
    assert rest[-1] == "done"
    first = min(losses(rest))
    assert 1 < first <= 36
    if number == signal.SIGTERM:
        assert first == max(losses(seen)) + 1, "a step that was finished was thrown away"
    assert {**losses(seen), **losses(rest)} == losses(whole)


class SignalAt(fp.Callback):
    """Sends this process a signal after a training batch, or after the validation that follows it."""

    def __init__(self, number: int, batch: int, in_validation: bool = False) -> None:
        self.number, self.batch, self.in_validation = number, batch, in_validation

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.progress.batches == self.batch and not self.in_validation:
            os.kill(os.getpid(), self.number)

    def on_validation_end(self, trainer, pl_module):
        if trainer.progress.batches == self.batch and self.in_validation:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 24}])
@pytest.mark.parametrize("in_validation", [False, True])
def test_sigterm_after_the_last_step_lets_the_training_end(make_trainer, limits, in_validation):
    val = loader(20, shuffle=False) if in_validation else None
    trainer = make_trainer(callbacks=[SignalAt(signal.SIGTERM, 24, in_validation)], **limits)
    trainer.fit(Classifier(), loader(), val)
    assert (trainer.global_step, trainer.state.status) == (24, "finished")
    again = make_trainer(**limits)
    again.fit(Classifier(), loader(), val, ckpt_path="last")
    assert again.global_step == 24


@pytest.mark.parametrize(
    ("number", "batch", "error"), [(signal.SIGTERM, 23, SystemExit), (signal.SIGINT, 24, KeyboardInterrupt)]
)
def test_sigterm_before_the_last_step_and_ctrl_c_end_the_training_at_once(make_trainer, number, batch, error):
    trainer = make_trainer(max_epochs=2, callbacks=[SignalAt(number, batch)])
    with pytest.raises(error):
        trainer.fit(Classifier(), loader())
    assert (trainer.global_step, trainer.state.status) == (batch, "interrupted")


def test_a_resumed_run_lets_go_of_the_checkpoint_that_it_was_resumed_from(make_trainer):
    class Remembering(Classifier):
        loaded: tuple[weakref.ref, ...] = ()
        alive: int = -1

        def on_load_checkpoint(self, checkpoint):
            self.loaded = tuple(map(weakref.ref, checkpoint["state_dict"].values()))

        def training_step(self, batch, batch_idx):
            self.alive = sum(tensor() is not None for tensor in self.loaded)
            return super().training_step(batch, batch_idx)

    make_trainer(max_epochs=1).fit(Remembering(), loader())
    resumed = Remembering()
    make_trainer(max_epochs=2).fit(resumed, loader(), ckpt_path="last")
    assert len(resumed.loaded) == len(resumed.state_dict())
    assert resumed.alive == 0
