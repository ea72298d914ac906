"""Trainings that are slow in one way each, and the advice that they get."""

from __future__ import annotations

import inspect
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pytest
import torch
from models import ranks
from models.small import Classifier, dataset
from torch import nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torch.utils.data import DataLoader

import footplate as fp
from footplate.hardware import cpu_rates
from footplate.monitoring.rules import advise
from footplate.training import monitor, step_looks

HERE = Path(__file__).name
TRAIN_S = "00:00:00:02"


@pytest.fixture
def advised(make_trainer, monkeypatch):
    """Train for two seconds; return the monitor."""
    at_once(monkeypatch)

    def train(module: Any, batches: Any, **settings: Any) -> monitor.Monitor:
        settings = {"max_time": TRAIN_S, "max_epochs": -1, "enable_checkpointing": False, **settings}
        trainer = make_trainer(**settings)
        trainer.fit(module, batches)
        return trainer.monitor

    return train


def at_once(monkeypatch: Any) -> None:
    """Let the monitor give advice after short trainings."""
    monkeypatch.setattr(monitor, "LEAST_S", 0.0)
    monkeypatch.setattr(monitor, "LOOK_S", 0.05)
    monkeypatch.setattr(monitor, "STEPS_BETWEEN_LOOKS", 3)
    monkeypatch.setattr(monitor, "WINDOW_S", 0.1)


def advice_of(observed: monitor.Monitor, rule: str) -> str:
    """The advice of a rule. Without it, the message shows what was measured."""
    texts = {advice.rule: str(advice) for advice in observed.advice}
    assert rule in texts, (texts, observed.evidence)
    return texts[rule]


def batches(rows: int, count: int = 50) -> list[Any]:
    """Batches that are made already, so that nothing waits for them."""
    return list(DataLoader(dataset(rows * count), rows))


def test_a_dataset_that_takes_long_without_workers(advised):
    class Slow(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.rows = dataset(100)

        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.002)
            return self.rows[index]

    advice = advised(Classifier(), DataLoader(Slow(), 10))
    text = advice_of(advice, "loader_without_workers")
    assert "of the time waits for input: the DataLoader makes its batches in the training process" in text
    assert "Set num_workers=" in text


class Mean(fp.Module):
    """A model that costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight * batch["image"][:, :, 0, 0].float().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.slow
@pytest.mark.alone
def test_images_that_take_long_to_decode(advised):
    rng = np.random.default_rng(0)
    image = cv2.imencode(".png", rng.integers(0, 255, (300, 300, 3), np.uint8))[1].tobytes()
    table = fp.Table(pa.table({"image": [image] * 200}))
    advice = advised(Mean(), fp.Loader(table, 8, image_size=200, num_threads=1))
    text = advice_of(advice, "input")
    assert "decoding `image` is the limit (1 thread, " in text
    assert "cache=" in text
    assert advice.evidence is not None
    assert (advice.evidence.loader.busy or 0.0) > 0.4


class Deep(fp.Module):
    """Many small layers."""

    def __init__(self, layers: int = 20, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.alone
def test_batches_of_two_rows(advised):
    assert "raise batch_size" in advice_of(advised(Deep(), batches(2)), "tiny_batches")


class Loops(Deep):
    """Goes through a sequence step by step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        state = batch[0].new_zeros(len(batch[0]))
        for _ in range(100):
            state = state * 0.9 + batch[0][:, 0]
        return self.net(batch[0]).square().mean() + state.mean()


def test_a_python_loop_in_the_model(advised):
    text = advice_of(advised(Loops(2), batches(16)), "python_loop")
    assert text.startswith(f"The Python loop at {HERE}:")
    assert "compile=True" in text


class Sorts(Deep):
    """Has NumPy sort numbers between two layers, for longer than another program interrupts a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.net(batch[0])
        order = np.sort(np.random.default_rng(0).random(1_000_000))
        return x.square().mean() * order[0]


@pytest.mark.alone
def test_numpy_in_training_step(advised):
    advice = advised(Sorts(2), batches(16))
    text = advice_of(advice, "python")
    # The layers are at the first line of the step, the square is at the third.
    first = inspect.getsourcelines(Sorts.training_step)[1] + 1
    assert f"is Python code between {HERE}:{first} and {HERE}:{first + 2} that runs no operation of torch" in text
    assert advice.evidence is not None
    assert 0.2 < sum(advice.evidence.pauses.values()) < 1.0


def test_a_pause_that_is_in_one_examined_step_only_is_another_programs_doing(advised):
    class Once(Deep):
        pauses = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = self.net(batch[0])
            # One pause, in an examined step.
            if _len_torch_dispatch_stack() and not self.pauses:
                self.pauses += 1
                time.sleep(0.1)
            return x.square().mean()

    module = Once(2)
    observed = advised(module, batches(16))
    assert module.pauses == 1
    assert observed.evidence is not None
    assert "python" not in {advice.rule for advice in observed.advice}


def test_a_pause_of_the_only_examined_step_is_no_advice(advised, monkeypatch):
    monkeypatch.setattr(step_looks, "EXAMINED_LOOKS", (2,))
    observed = advised(Sorts(2), batches(16))
    assert observed.evidence is not None
    assert observed.evidence.operations > 0
    assert "python" not in {advice.rule for advice in observed.advice}


class Reads(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        if loss.item() > 1e6 or float(loss) < 0:
            return None
        return loss


def test_item_in_training_step_is_named_by_its_line_on_devices_that_it_stops(advised):
    observed = advised(Reads(2), batches(16))
    assert observed.evidence is not None
    assert "reads" not in {advice.rule for advice in observed.advice}
    (line,) = observed.evidence.reads
    (advice,) = [advice for advice in advise(replace(observed.evidence, device="cuda")) if advice.rule == "reads"]
    assert line.startswith(f"{__file__}:")
    assert str(advice).startswith(
        f"{HERE}:{line.rpartition(':')[2]} reads a value from the device 2 times in each step"
    )


def test_shapes_that_change_under_torch_compile(advised):
    lengths = [torch.randn(4, width, 8) for width in range(2, 8)]
    options = {"backend": "eager", "dynamic": False}
    advice = advised(Deep(1), [(length,) for length in lengths], compile=options, max_time=None, max_steps=12)
    # Torch stops compiling a function that it has compiled too often, also for other modules.
    torch._dynamo.reset()
    assert "times" in advice_of(advice, "shapes")


def test_logging_each_step(advised):
    class Logs(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            for index in range(30):
                self.log(f"part_{index}", loss * index)
            return loss

    advice = advised(Logs(1), batches(4), log_every_n_steps=1, logger=fp.CSV())
    assert "Set log_every_n_steps=50" in advice_of(advice, "logging")


def test_a_checkpoint_after_every_step(advised):
    saves = fp.ModelCheckpoint(every_n_train_steps=1, save_top_k=1)
    advice = advised(Deep(3), batches(4), callbacks=[saves], enable_checkpointing=True)
    assert "every_n_train_steps=" in advice_of(advice, "checkpoints")


def test_a_callback_that_takes_long(advised):
    class Slow(fp.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            time.sleep(0.002)

    assert "hooks between two steps: Slow" in advice_of(advised(Deep(1), batches(4), callbacks=[Slow()]), "hooks")


def test_float32_where_bfloat16_is_faster(advised):
    module = Deep(2, 512)
    observed = advised(module, [(torch.randn(256, 512),)] * 20)
    assert observed.evidence is not None
    assert observed.evidence.flops
    gain = cpu_rates.flops_per_s(torch.bfloat16) / cpu_rates.flops_per_s(torch.float32)
    products = observed.evidence.mfu or 0.0
    if 1 / (1 - products + products / gain) >= 1.15:
        assert 'Set precision="bf16-mixed"' in advice_of(observed, "precision")
    else:
        assert "precision" not in {advice.rule for advice in observed.advice}


# Long enough for a machine on which other programs run.
SLEEPS_S = 0.15
STEPS = 30


class SlowRank(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1:
            time.sleep(SLEEPS_S)
        return super().training_step(batch, batch_idx)


class SlowByHand(SlowRank):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def _two_ranks(root: Path, strategy: str, module: type[SlowRank]) -> Any:
    at_once(pytest.MonkeyPatch())
    trainer = fp.Trainer(
        accelerator="cpu", default_root_dir=root, max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, seed=1, strategy=strategy,
    )  # fmt: skip
    trainer.fit(module(2), DataLoader(dataset(1000), 4))
    return {advice.rule: str(advice) for advice in trainer.monitor.advice}, dict(trainer.monitor.seconds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "module"),
    [("ddp", SlowRank), ("fsdp", SlowRank), ("ddp", SlowByHand)],
    ids=["ddp", "fsdp", "ddp, by hand"],
)
def test_a_slow_rank_is_named_and_the_wait_for_it_is_communication_in_any_phase(tmp_path, strategy, module):
    slept_s = STEPS * SLEEPS_S
    (advice, fast), (_, slow) = ranks.run(_two_ranks, 2, tmp_path, strategy, module)
    assert advice.get("slow_rank", str((advice, fast, slow))).startswith("Rank 1 needs ")
    # The messages take as long on both ranks, so the difference is the wait.
    assert fast["communication"] - slow["communication"] > 0.7 * slept_s, (fast, slow)
    # The wait counts for no phase, although FSDP2 waits inside the forward and the backward pass.
    assert slow["forward"] > 0.7 * slept_s
    assert sum(fast.get(phase, 0.0) for phase in ("forward", "backward", "optimizer", "step")) < 0.5 * slept_s, fast
