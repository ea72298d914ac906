"""Placement with `accelerator="xla"`: batches that are on the devices before their step, and sharded weights."""

from __future__ import annotations

import threading

import pytest
import torch
from models.small import dataset, loader
from torch import nn

import footplate as fp
from footplate import checkpoint
from footplate.step.xla.runtime.batch_placement import BatchPlacement
from footplate.step.xla.runtime.sharding import SMALL, layout
from step.xla.trained import Steady, equal, worst


def batches(rows=50, size=10):
    """A list of batches, which any thread may read."""
    x, y = dataset(rows).tensors
    return list(zip(x.split(size), y.split(size), strict=True))


def fitted(make_trainer, model=None, data=None, val=None, **given):
    torch.manual_seed(0)
    model = Steady() if model is None else model
    trainer = make_trainer(**{"accelerator": "xla", "precision": "64-true", **given})
    trainer.fit(model, batches() if data is None else data, [batches(20)] if val is None else val)
    return trainer


@pytest.fixture
def placing(monkeypatch):
    """Names of the threads that have put batches onto the devices."""
    threads = []
    place = BatchPlacement.place

    def noted(self, stage, batch):
        threads.append((stage, threading.current_thread().name))
        return place(self, stage, batch)

    monkeypatch.setattr(BatchPlacement, "place", noted)
    return threads


def test_batches_are_put_onto_the_mesh_by_a_thread_ahead_of_their_step(placing, make_trainer):
    compiled = fitted(make_trainer, devices=2)
    assert {name for stage, name in placing if stage == "training"} == {"footplate-prefetch"}
    assert len([stage for stage, _ in placing if stage == "training"]) == 10
    assert ("validation", "footplate-prefetch") in placing
    assert worst(compiled.module, fitted(make_trainer, accelerator="cpu").module) < 1e-6


class Mixes(fp.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        batch[0].mul_(0.5)


class Halves(Steady):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * 0.5, batch[1]


@pytest.mark.parametrize("who", ["callback", "module"])
def test_a_batch_that_a_hook_changes_before_its_step_is_not_put_there_before(who, placing, make_trainer):
    callbacks, kind = ([Mixes], Steady) if who == "callback" else ([], Halves)
    ends = []
    for name in ("cpu", "xla"):
        torch.manual_seed(0)
        made = fitted(
            make_trainer, kind(), accelerator=name, callbacks=[callback() for callback in callbacks], max_epochs=1
        )
        ends.append(made.module)
    assert {name for stage, name in placing if stage == "training"} == {"MainThread"}
    assert worst(ends[1], ends[0]) < 1e-6


def test_the_time_that_the_devices_waited_for_batches_is_reported(make_trainer, tmp_path):
    made = fitted(
        make_trainer, callbacks=fp.DataWaitMonitor(), logger=fp.CSV(), log_every_n_steps=2, default_root_dir=tmp_path,
    )  # fmt: skip
    assert 0 <= float(made.callback_metrics["data_wait"]) <= 1


def test_tensors_are_cut_along_the_longest_dimension_that_the_devices_divide():
    assert tuple(layout((64, 128), 4, True)) == (None, "data")
    assert tuple(layout((128, 63), 4, True)) == ("data",)
    for shape in [(63, 127), (SMALL // 4 - 4, 4), ()]:
        assert tuple(layout(shape, 4, True)) == ()
    assert tuple(layout((64, 128), 4, False)) == ()


class Wide(Steady):
    """With a layer that is large enough to shard, and BatchNorm."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 256), nn.BatchNorm1d(256), nn.Tanh(), nn.Linear(256, 3))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Sizes(fp.Callback):
    """Records the part of each state tensor on one device."""

    sees_weights = False

    def on_train_batch_end(self, trainer, *_):
        state = trainer.step._weights.put()
        self.parts = {path: state[path].size // state[path].addressable_shards[0].data.size for path in state}


Sizes.__module__ = "footplate.callbacks.early_stopping"


@pytest.mark.slow
def test_weights_in_parts_train_like_whole_ones_on_one_device(make_trainer, tmp_path):
    """Odd batches, BatchNorm over the whole batch, windows. The checkpoint is an ordinary one, and the CPU continues it."""
    ends, states, sizes = [], [], Sizes()
    for name, given in (("cpu", {}), ("xla", {"devices": 4, "strategy": "fsdp", "callbacks": sizes})):
        torch.manual_seed(0)
        made = fitted(
            make_trainer, Wide(), batches(46, 8), accelerator=name, gradient_clip_val=0.5, accumulate_grad_batches=2,
            default_root_dir=tmp_path / name, **given,
        )  # fmt: skip
        ends.append(made.module)
        states.append(checkpoint.load(checkpoint.newest([tmp_path / name / "checkpoints"])))
    assert worst(ends[1], ends[0]) < 1e-6
    assert states[0]["state_dict"].keys() == states[1]["state_dict"].keys()
    assert equal(states[0]["progress"], states[1]["progress"])
    for path in (("params", "net.0.weight"), ("optimizer", "net.0.weight", "momentum_buffer")):
        assert sizes.parts[path] == 4
    assert sizes.parts["params", "net.3.bias"] == 1


def test_a_loader_that_works_in_the_steps_thread_is_not_read_ahead(placing, make_trainer):
    fitted(make_trainer, data=loader(20), val=loader(10), max_epochs=1)
    assert {name for _, name in placing} == {"MainThread"}
