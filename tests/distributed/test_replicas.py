"""Replicas of a module on several devices of one process get the result of one module with the whole batch."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ranks
from torch import nn

import footplate as fp
from footplate import checkpoint
from footplate.core.errors import ConfigError

from .common import Plain, equal, loader, make, same, seeded, weights
from .test_ddp import BatchNorm, Closure, Unfreezes, Unused


class Groups(Plain):
    """Two groups, a scheduler by steps, and an optimizer step of its own."""

    def configure_optimizers(self) -> Any:
        first, last = self.net[0].parameters(), self.net[2].parameters()
        optimizer = torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": last, "lr": 0.01}], momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


class Tied(Plain):
    """One layer used twice, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(self.first(self.first(batch[0]))), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return {"loss": loss, "rows": batch[1]}


def train(root: Path, module: type, rows: int, devices: int, **settings: Any) -> dict[str, Any]:
    model = seeded(module)
    trainer = make(root, devices=devices, strategy="replicas", **settings)
    trainer.fit(model, loader(rows, 16), loader(33, 16, shuffle=False))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": weights(model), "metrics": metrics, "step": trainer.global_step}


CASES: dict[str, tuple[type, int, int, dict[str, Any]]] = {
    "even batches": (Plain, 48, 2, {}),
    "an uneven number of replicas": (Plain, 48, 3, {}),
    "an uneven tail": (Plain, 51, 2, {}),
    "a tail of fewer rows than replicas": (Plain, 50, 5, {}),
    "accumulation": (Plain, 49, 2, {"accumulate_grad_batches": 3}),
    "clipping by norm": (Plain, 51, 2, {"gradient_clip_val": 0.1}),
    "clipping by value": (Plain, 51, 2, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "groups, a scheduler and an optimizer step of its own": (Groups, 51, 2, {}),
    "a closure": (Closure, 48, 2, {"max_epochs": 1}),
    "unfreezing": (Unfreezes, 48, 2, {}),
    "parameters without a gradient": (Unused, 48, 2, {}),
    "a dict, tied and frozen parameters": (Tied, 51, 2, {}),
    "double precision": (Plain, 51, 2, {"precision": "64-true"}),
    "finding anomalies": (Plain, 48, 2, {"detect_anomaly": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_replicas_learn_what_one_process_with_the_whole_batch_learns(name, tmp_path):
    module, rows, devices, settings = CASES[name]
    alone = train(tmp_path / "alone", module, rows, 1, **settings)
    shared = train(tmp_path / "shared", module, rows, devices, **settings)
    same(alone["weights"], shared["weights"])
    assert alone["step"] == shared["step"]
    assert shared["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)


@pytest.mark.parametrize("module", [Plain, BatchNorm])
def test_two_replicas_are_bit_for_bit_the_two_ranks_of_ddp(module, tmp_path):
    """Including running statistics: both use the first device's rows."""
    shared = train(tmp_path / "replicas", module, 48, 2)

    def as_rank() -> dict[str, torch.Tensor]:
        model, trainer = seeded(module), make(tmp_path / "ddp", num_sanity_val_steps=0)
        trainer.fit(model, loader(48, 8))
        return weights(model)

    equal(shared["weights"], ranks.run(as_rank, 2)[0])


class Logs(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        errors = F.cross_entropy(self.net(x), y, reduction="none")
        self.log("mean", errors.mean(), on_step=True, on_epoch=True)
        self.log_dict({"sum": (y == 1).sum(), "number": float(y.sum())}, on_epoch=True, reduce_fx="sum")
        self.log("least", x.min(), on_epoch=True, reduce_fx="min")
        self.log("most", float(x.max()), on_epoch=True, reduce_fx=torch.max)
        self.log("weighted", (y == 0).float().mean(), on_epoch=True, batch_size=len(y))
        self.log("rows", len(y), on_epoch=True, reduce_fx=lambda values: values.sum())
        for part in x[:1]:
            self.log("twice", part.mean() * 0 + 1)
            self.log("twice", part.mean() * 0 + 2, on_epoch=True)
        return errors.mean()


@pytest.mark.parametrize("devices", [2, 3])
def test_what_replicas_log_is_what_one_process_logs(devices, tmp_path):
    alone, shared = (train(tmp_path / str(n), Logs, 50, n)["metrics"] for n in (1, devices))
    own = ("rows", "rows_step", "rows_epoch")  # a function gets each replica's value: their sum is the same
    assert shared["rows_epoch"] == alone["rows_epoch"] == 50
    assert {k: v for k, v in shared.items() if k not in own} == pytest.approx(
        {k: v for k, v in alone.items() if k not in own}, rel=1e-4
    )


class Watched(Plain):
    """Records the thread, mode and type with which rows run."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.seen: list[Any] = []  # each copy's own

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale = 2.0 + batch_idx
        self.net[1].eval()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        SEEN.append((threading.current_thread().name, len(batch[0]), self.scale, self.net[1].training, out.dtype))
        return F.cross_entropy(out.float(), batch[1])


SEEN: list[Any] = []


def test_each_replica_has_a_kept_thread_and_sees_what_hooks_set(tmp_path):
    SEEN.clear()
    train(tmp_path, Watched, 48, 2, precision="bf16-mixed")
    assert len(SEEN) == 2 * 2 * 3
    assert {name for name, *_ in SEEN} == {"replica 0 (cpu)", "replica 1 (cpu)"}
    assert {(rows, training, dtype) for _, rows, _, training, dtype in SEEN} == {(8, False, torch.bfloat16)}
    assert sorted(scale for _, _, scale, _, _ in SEEN) == [2.0] * 4 + [3.0] * 4 + [4.0] * 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


class Skips(Plain):
    """Skips some rows: those whose first class is 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1]) if batch[1][0] != 1 else None


def test_a_replica_that_skips_its_rows_counts_as_a_loss_of_zero(tmp_path):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    def fit(y: list[int]) -> tuple[nn.Module, fp.Trainer]:
        model = seeded(Skips)
        trainer = make(tmp_path, devices=2, strategy="replicas", max_epochs=1, enable_checkpointing=False)
        trainer.fit(model, [(x, torch.tensor(y))])
        return model, trainer

    model, trainer = fit([0, 2, 1, 2])
    alone = seeded(Skips)
    optimizer = alone.configure_optimizers()
    (F.cross_entropy(alone.net(x[:2]), torch.tensor([0, 2])) / 2).backward()
    optimizer.step()
    equal(weights(alone), weights(model))
    assert trainer.global_step == 1
    model, trainer = fit([1, 2, 1, 2])
    equal(weights(seeded(Skips)), weights(model))
    assert trainer.global_step == 0


class Fails(Plain):
    """Fails in the replicas `who`, on their own rows: `where` is "forward" or "backward"."""

    where, who, at = "forward", (1,), 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        mine = int(threading.current_thread().name.split()[1])
        if batch_idx == self.at and mine in self.who:
            if self.where == "forward":
                raise ValueError(f"no good in {mine}")
            out.register_hook(self.fail)
        return F.cross_entropy(out, batch[1])

    def fail(self, gradient: Any) -> Any:
        raise ValueError("no good behind")


def fail(root: Path, module: type) -> ValueError:
    trainer = make(root, devices=3, strategy="replicas")
    with pytest.raises(ValueError, match="no good") as raised:
        trainer.fit(seeded(module), loader(48, 16, shuffle=False))
    return raised.value


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_a_replica_raises_comes_whole_with_the_device(where, tmp_path):
    error = fail(tmp_path, type("Fails", (Fails,), {"where": where}))
    assert error.__notes__ == ["Raised in replica 1 of 3, on cpu."]
    assert "raise ValueError(" in "".join(traceback.format_exception(error))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


def test_of_several_exceptions_the_first_replicas_is_raised_and_the_others_are_named(tmp_path):
    error = fail(tmp_path, type("Fails", (Fails,), {"who": (1, 2)}))
    assert error.__notes__ == ["Raised in replica 1 of 3, on cpu.", "Replica 2 raised ValueError too: no good in 2"]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_run_is_saved_as_it_stood_before_the_step_unless_gradients_have_begun_to_change(where, tmp_path):
    fail(tmp_path / "failed", type("Fails", (Fails,), {"where": where}))
    saved = list((tmp_path / "failed").rglob("*.ckpt"))
    if where == "backward":
        assert not saved
        return
    shorter = seeded(Plain)
    make(tmp_path / "shorter", devices=3, strategy="replicas", max_steps=2).fit(shorter, loader(48, 16, shuffle=False))
    equal(weights(shorter), checkpoint.load(saved[0])["state_dict"])


class Ends(fp.Callback):
    """Sends this process a signal after some batches."""

    def __init__(self, at: int, number: signal.Signals) -> None:
        self.at, self.number = at, number

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.progress.batches == self.at:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_saves_and_the_run_goes_on_with_the_same_or_another_number_of_replicas(number, ending, tmp_path):
    def fit(root: str, devices: int, *callbacks: fp.Callback, strategy: str = "replicas") -> Any:
        model = seeded()
        settings = {"accumulate_grad_batches": 2, "callbacks": [*callbacks, fp.ModelCheckpoint()]}
        trainer = make(tmp_path / root, devices=devices, strategy=strategy, **settings)
        trainer.fit(model, loader(80, 16), ckpt_path="last")
        return weights(model)

    whole = fit("whole", 2)
    for root, devices in (("same", 2), ("more", 3), ("one", 1)):
        with pytest.raises(ending):
            fit(root, 2, Ends(3, number))  # inside an accumulation window, and an epoch
        continued = fit(root, devices)
        (equal if devices == 2 else same)(whole, continued)


def test_a_run_goes_on_with_ddp(tmp_path):
    with pytest.raises(SystemExit):
        make(tmp_path, devices=2, strategy="replicas", callbacks=Ends(3, signal.SIGTERM)).fit(
            seeded(), loader(48, 16, shuffle=False)
        )
    model, whole = seeded(), seeded()
    make(tmp_path, devices=2).fit(model, loader(48, 8, shuffle=False), ckpt_path="last")
    make(tmp_path / "whole", devices=2, strategy="replicas").fit(whole, loader(48, 16, shuffle=False))
    same(weights(whole), weights(model))


class ByHand(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Plain):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Sparse(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 4, sparse=True)


class Locked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net[1].guard = threading.Lock()


class Measures(Plain):
    """A torchmetrics object, updated or logged in training."""

    logs = True

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import MeanMetric

        self.average = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.average.update(loss)
        if self.logs:
            self.log("average", self.average)
        return loss


class MeasuresValidation(Measures):
    training_step = Plain.training_step

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.average.update(batch[0].mean())


def test_a_torchmetrics_object_may_measure_validation(tmp_path):
    model = MeasuresValidation()
    make(tmp_path, devices=2, strategy="replicas", val_check_interval=1, num_sanity_val_steps=0).fit(
        model, loader(48, 16), loader(33, 16)
    )
    assert model.average.update_count == 6 * 3


REFUSED: dict[str, tuple[type, str]] = {
    "manual optimisation": (ByHand, "which excludes automatic_optimization = False"),
    "a backward of its own": (OwnBackward, r"it would never call OwnBackward.backward\(\)"),
    "sparse gradients": (Sparse, r"words \(Embedding\) has sparse=True"),
    "an attribute that can't be copied": (Locked, r"its attribute net\.1\.guard \(lock\) can't be copied"),
    "a torchmetrics object that is logged": (Measures, r'self.log\("average"'),
    "one that is updated": (type("Updates", (Measures,), {"logs": False}), "torchmetrics object average"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_replicas_can_not_train_is_refused_by_name(name, tmp_path):
    module, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        make(tmp_path, devices=2, strategy="replicas").fit(module(), loader(16, 8))


@pytest.mark.parametrize("argument", [{"compile": True}, {"sync_batchnorm": True}, {"min_devices": 1}])
def test_arguments_that_do_not_go_with_replicas_are_refused(argument, tmp_path):
    name = next(iter(argument))
    with pytest.raises(ConfigError, match=f'{name}=.* doesn\'t go with strategy="replicas"'):
        make(tmp_path, devices=2, strategy="replicas", **argument)


def test_one_of_several_processes_is_told_to_use_ddp(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match='this is one of 2: use strategy="ddp"'):
        make(tmp_path, strategy="replicas")


def test_a_batch_that_can_not_be_cut_is_refused(tmp_path):
    batches = [(torch.zeros(4, 8), torch.zeros(3, dtype=torch.long))]
    with pytest.raises(ConfigError, match=r"the shape \(3,\), where the first has 4 rows"):
        make(tmp_path, devices=2, strategy="replicas").fit(Plain(), batches)


def test_evaluation_and_prediction_run_here_on_the_first_device(tmp_path):
    model = seeded()
    trainer, alone = make(tmp_path, devices=3, strategy="replicas"), make(tmp_path)
    data = loader(33, 16, shuffle=False)
    assert trainer.validate(model, data) == alone.validate(model, data)
    predictions, wanted = trainer.predict(model, data), alone.predict(model, data)
    assert all(torch.equal(one["class"], other["class"]) for one, other in zip(predictions, wanted, strict=True))
