"""When a step may be replayed as a CUDA graph, and when it must not. `tests/gpu/test_step_graph.py` has the same on a GPU.

Here, a graph is a list of operations (`recorded_graph.py`).
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.small import Classifier, dataset, loader
from torch import nn
from torch.utils.data import DataLoader

import footplate as fp
from footplate.step import compiled_step
from step.recorded_graph import RecordedGraph, let_cpu_have_graphs
from step.test_compiled_step import train as train_module


@pytest.fixture
def graphs(monkeypatch):
    return let_cpu_have_graphs(monkeypatch)


class Logs(Classifier):
    def __init__(self, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.make_optimizer = optimizer

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(trainer, module=Logs, data=None, **settings):
    weights, metrics, made = train_module(trainer, module, data, **{"max_epochs": 3, **settings})
    return weights, metrics, made.module


def alike(trainer, graphs, module=Logs, rtol=1e-4, **settings):
    """Train eagerly and by graphs, and compare; return both modules."""
    eager, metrics, one = train(trainer, module, **settings)
    assert graphs.replays == 0
    compiled, compiled_metrics, other = train(trainer, module, compile="step", **settings)
    torch.testing.assert_close(compiled, eager, rtol=rtol, atol=1e-5)
    assert compiled_metrics == pytest.approx(metrics, rel=rtol)
    return one, other


@pytest.mark.parametrize(("optimizer", "clip"), [(torch.optim.AdamW, 0.1), (torch.optim.SGD, None)])
def test_after_three_steps_each_step_is_a_replay(make_trainer, graphs, optimizer, clip):
    """Each replay draws its own dropout, steps with the falling learning rate, and logs its loss."""
    alike(make_trainer, graphs, lambda: Logs(optimizer), gradient_clip_val=clip)
    assert (graphs.captured, graphs.replays) == (1, 36 - 3)


def test_a_smaller_batch_runs_eagerly_in_between(make_trainer, graphs):
    alike(make_trainer, graphs, data=DataLoader(dataset(84), 10))
    assert (graphs.captured, graphs.replays) == (1, 3 * 8 - 3)


def test_another_batch_size_has_a_graph_of_its_own(make_trainer, graphs, tmp_path):
    def run(compiled):
        settings = {"compile": compiled, "default_root_dir": tmp_path / str(compiled)}
        train(make_trainer, data=DataLoader(dataset(80), 10), max_epochs=1, **settings)
        torch.manual_seed(0)
        model = Logs()
        trainer = make_trainer(max_epochs=3, **settings)
        trainer.fit(model, DataLoader(dataset(80), 8), ckpt_path="last")
        return torch.cat([value.flatten() for value in model.state_dict().values()])

    torch.testing.assert_close(run("step"), run(False), rtol=1e-4, atol=1e-5)
    assert (graphs.captured, graphs.replays) == (2, 8 - 3 + 20 - 1 - 3)


class Reads(Logs):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.last = loss.detach()
        return loss * self.factor

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.kept.append(self.last)

    def on_train_epoch_end(self):
        self.factor *= 0.5


def test_an_attribute_that_changes_ends_a_graph(make_trainer, graphs, caplog):
    """What the step puts on the module is there after a replay, and stays as it was after the next."""
    eager, compiled = alike(make_trainer, graphs, Reads)
    torch.testing.assert_close(torch.stack(compiled.kept), torch.stack(eager.kept), rtol=1e-4, atol=1e-5)
    assert graphs.replays == 9
    assert "numbers or tensors of the CPU" in caplog.text


class ReadsFlag(Logs):
    def __init__(self) -> None:
        super().__init__()
        self.doubled = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return 2 * loss if self.doubled else loss

    def on_train_epoch_start(self):
        self.doubled = self.current_epoch % 2 == 1


def test_a_step_has_a_graph_for_each_way_that_it_takes(make_trainer, graphs):
    alike(make_trainer, graphs, ReadsFlag)
    assert (graphs.captured, graphs.replays) == (2, 9 + 9 + 12)


class KeepsBatches(Logs):
    """Returns parts of the batch, and keeps some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self.returned: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        if self.keeps:
            self.kept.append(batch[1])
        return {"loss": super().training_step(batch, batch_idx), "classes": batch[1], "first": batch[0][:1]}

    def on_train_batch_start(self, batch, batch_idx):
        self.keeps = batch_idx == 4

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["classes"].data_ptr() == batch[1].data_ptr()
        self.returned.append(outputs["first"])


def test_a_batch_that_the_module_keeps_is_not_overwritten(make_trainer, graphs):
    eager, compiled = alike(make_trainer, graphs, KeepsBatches)
    assert torch.equal(torch.stack(compiled.kept), torch.stack(eager.kept))
    assert torch.equal(torch.stack(compiled.returned), torch.stack(eager.returned))
    assert graphs.replays > 15


class SeesGradients(fp.Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.norms.append(float(pl_module.net[0].weight.grad.norm()))


def test_gradients_are_those_of_the_latest_step(make_trainer, graphs):
    norms = []
    for compiled in (False, "step"):
        callback = SeesGradients()
        train(make_trainer, data=DataLoader(dataset(84), 10), compile=compiled, callbacks=[callback])
        norms.append(callback.norms)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert graphs.replays == 3 * 8 - 3


class ReadsIndex(Logs):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + batch_idx)


class Remembers(Logs):
    """Computes with a tensor that is another object in each step."""

    mean = torch.zeros(())

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss * (1 + self.mean)


class Splits(Logs):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.value = loss.item()
        return loss * (1 + self.value)


class OwnBackward(Logs):
    def backward(self, loss):
        (2 * loss).backward()


class GradientHook(Logs):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.net[0].weight.register_hook(self.count)

    def count(self, gradient):
        self.calls += 1
        return gradient / self.calls


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (ReadsIndex, "numbers or tensors of the CPU"),
        (Splits, "programs of training_step"),
        (OwnBackward, "OwnBackward.backward runs in it"),
        (GradientHook, "a parameter has a hook"),
        (lambda: Logs(lambda parameters, lr: Own(parameters, lr)), "the step of Own is not torch's own"),
    ],
)
def test_a_step_that_a_graph_would_do_wrong_is_none(make_trainer, graphs, caplog, module, reason):
    alike(make_trainer, graphs, module)
    assert graphs.replays == 0
    assert reason in caplog.text


def test_a_capture_that_fails_ends_graphs_and_its_first_error_is_named(make_trainer, graphs, caplog, monkeypatch):
    @contextlib.contextmanager
    def capture(graph, *settings):
        try:
            yield
            raise ValueError("an operation can't be captured")
        except ValueError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904  as torch does

    monkeypatch.setattr(torch.cuda, "graph", capture)
    # torch's captures run nothing; this one runs its operations, so it has none that change weights.
    monkeypatch.setattr(compiled_step.CompiledStep, "after_forward", lambda self, loss: None)
    alike(make_trainer, graphs)
    assert (graphs.captured, graphs.replays) == (0, 0)
    assert "it can't be captured: ValueError: an operation can't be captured" in caplog.text
    assert gc.isenabled()


class Own(torch.optim.SGD):
    def step(self):
        return super().step()


def test_a_tensor_that_is_another_one_each_time_is_not_replayed(make_trainer, graphs):
    alike(make_trainer, graphs, Remembers)
    assert graphs.replays == 0


class Exchanges(fp.Callback):
    """Puts other memory under a parameter, or under the optimizer's state, or changes a setting, between two steps."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step not in (10, 20):
            return
        optimizer = trainer.optimizers[0]
        if self.what == "parameter":
            pl_module.net[0].weight.data = pl_module.net[0].weight.data * 0.5
        if self.what == "state":
            optimizer.state[pl_module.net[0].weight]["exp_avg"] = torch.zeros_like(pl_module.net[0].weight)
        if self.what == "setting":
            optimizer.param_groups[0]["weight_decay"] += 0.1
        if self.what == "frozen":
            pl_module.net[0].weight.requires_grad_(False)


@pytest.mark.parametrize(("what", "replays"), [("parameter", 27), ("state", 27), ("setting", 7), ("frozen", 30)])
def test_what_a_callback_changes_is_seen(make_trainer, graphs, what, replays):
    def run(compiled):
        return train(make_trainer, Logs, callbacks=[Exchanges(what)], compile=compiled, max_epochs=3)[0]

    eager, captured = run(False), run("step")
    torch.testing.assert_close(captured, eager, rtol=1e-4, atol=1e-5)
    assert graphs.replays == replays


class Watches(fp.Callback):
    """Registers a hook of the optimizer in the middle of training."""

    def __init__(self) -> None:
        self.calls = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 10:
            trainer.optimizers[0].register_step_post_hook(self.count)

    def count(self, optimizer, args, kwargs):
        self.calls += 1


def test_a_hook_of_the_optimizer_is_called_from_its_registration_on(make_trainer, graphs, caplog):
    watches = Watches()
    train(make_trainer, callbacks=[watches], compile="step")
    assert (watches.calls, graphs.replays) == (26, 7)
    assert "the step of AdamW is not one program" in caplog.text


def test_the_memory_of_graphs_is_freed_after_a_call(make_trainer, graphs):
    def alive():
        gc.collect()
        return sum(1 for each in gc.get_objects() if type(each) is RecordedGraph)

    before = alive()
    trainer = make_trainer(max_epochs=1, compile="step")
    trainer.fit(Logs(), loader())
    assert graphs.replays == 9
    assert alive() == before


def test_batch_norm_counts_in_a_replay(make_trainer, graphs):
    def module():
        # The bias before a batch norm has no gradient but rounding, which AdamW would magnify.
        model = Logs(torch.optim.SGD)
        model.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        return model

    _, compiled = alike(make_trainer, graphs, module)
    assert int(compiled.net[1].num_batches_tracked) == 36
    assert graphs.replays == 33


def test_a_resumed_run_goes_on_bit_for_bit(make_trainer, graphs, tmp_path):
    whole, _, _ = train(make_trainer, default_root_dir=tmp_path / "whole", compile="step")
    cut, _, _ = train(make_trainer, default_root_dir=tmp_path / "cut", compile="step", max_epochs=2)
    assert not torch.equal(cut, whole)
    trainer = make_trainer(max_epochs=3, default_root_dir=tmp_path / "cut", compile="step")
    model = Logs()
    trainer.fit(model, loader(), ckpt_path="last")
    assert torch.equal(torch.cat([value.flatten().float() for value in model.state_dict().values()]), whole)
