"""Batches that are on the device before their step: only the clock shows a difference.

The accelerator of these tests is the CPU, declared as one whose copies run beside its work.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from distributed.common import equal, seeded, weights
from models import ranks
from models.small import Classifier, dataset, loader
from torch.utils.data import DataLoader, Dataset, IterableDataset

import footplate as fp
from footplate import checkpoint
from footplate.data.adapters.adapt import adapt
from footplate.data.adapters.workers import made_in_background
from footplate.hardware.cpu import CPU
from footplate.hardware.transfer import map_tensors, movable, to_device
from training.test_resume import Augmented, PowerCut, Recorder


class Asynchronous(CPU):
    batches_ahead = 2


def reading() -> bool:
    return any(thread.name == "footplate-prefetch" for thread in threading.enumerate())


class Parcel:
    """A batch that moves itself, and remembers the thread that moved it."""

    def __init__(self, pair: Any) -> None:
        self.pair = pair
        self.moved_by: list[str] = []

    def to(self, device: torch.device, non_blocking: bool = False) -> Parcel:
        self.moved_by.append(threading.current_thread().name)
        return self


class Opens(Classifier):
    """A module that trains, validates, tests and predicts on parcels."""

    def forward(self, parcel: Parcel) -> Any:
        return self.net(parcel.pair[0])

    def training_step(self, batch: Parcel, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch), batch.pair[1])

    def validation_step(self, batch: Parcel, batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self(batch), batch.pair[1]))

    test_step = validation_step


def parcels(count: int = 12) -> list[Parcel]:
    return [Parcel(pair) for pair in loader(10 * count, shuffle=False)]


class Stream(IterableDataset):
    """Batches of unknown length. The second half comes from the second worker."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        for number in range(worker.id, 11, worker.num_workers):
            x = torch.randn(10, 8, generator=torch.Generator().manual_seed(number))
            yield x, (x[:, 0] > 0).long()


class Pairs(Classifier):
    """Accepts batches from the columns of a table too, and draws from every generator that a step may draw from."""

    def training_step(self, batch, batch_idx):
        x, label = (batch["x"], batch["label"]) if isinstance(batch, dict) else batch
        weight = float(np.random.beta(0.4, 0.4)) * random.random()
        loss = F.cross_entropy(self(x + weight * torch.rand_like(x)), label)
        self.log("train_loss", loss, on_epoch=True)
        return loss


def worker_loader() -> DataLoader:
    return DataLoader(dataset(), 10, shuffle=True, num_workers=1)


def table_loader(transform: Any = None) -> fp.Loader:
    x, label = dataset().tensors
    rows = pa.table({"x": pa.FixedSizeListArray.from_arrays(x.flatten().numpy(), 8), "label": label.numpy()})
    return fp.Loader(fp.Table(rows), 10, shuffle=True, seed=3, transform=transform)


LOADERS = {
    "a table": table_loader,
    "a DataLoader with workers": lambda: DataLoader(Augmented(), 10, shuffle=True, num_workers=2),
    "a stream of workers": lambda: DataLoader(Stream(), None, num_workers=2),
    "a list of batches": lambda: list(loader(shuffle=False)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plainly": {},
    "accumulation": {"accumulate_grad_batches": 4},
    "a part of an epoch": {"limit_train_batches": 7},
    "validation in mid-epoch": {"val_check_interval": 5},
}


def fit(
    make_trainer, root, data, accelerator=None, ckpt_path=None, recorder=None, **settings
) -> tuple[dict, dict, Any]:
    """Train a seeded module. Return the record of each batch, the weights, and the trainer."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    module, recorder = Pairs(), recorder or Recorder()
    trainer = make_trainer(
        accelerator=accelerator or Asynchronous(),
        callbacks=[recorder, fp.ModelCheckpoint(every_n_train_steps=2)],
        max_epochs=3,
        default_root_dir=root,
        **settings,
    )
    with contextlib.suppress(PowerCut):
        trainer.fit(module, data, loader(40, shuffle=False), ckpt_path=ckpt_path)
    return recorder.seen, module.state_dict(), trainer


CASES = [
    *((source, "plainly") for source in LOADERS),
    *(("a list of batches", setting) for setting in SETTINGS if setting != "plainly"),
    *(("a DataLoader with workers", setting) for setting in ("accumulation", "a part of an epoch")),
]


@pytest.mark.parametrize(("source", "setting"), CASES)
@pytest.mark.filterwarnings("ignore:DataLoader has no position to restore")
def test_a_run_is_bit_for_bit_the_one_that_reads_at_the_step_and_so_is_one_that_was_cut_off(
    source, setting, make_trainer, tmp_path
):
    data, settings = LOADERS[source], SETTINGS[setting]
    seen, whole, _ = fit(make_trainer, tmp_path / "at the step", data(), CPU(), **settings)
    ahead, weights_ahead, made = fit(make_trainer, tmp_path / "ahead", data(), **settings)
    assert ahead == seen
    assert all(torch.equal(value, weights_ahead[name]) for name, value in whole.items())
    assert made.run.state.loader is made.run.loop.source is not made.run.loop.loader, "it was not read ahead"

    for cut_at in (len(seen) // 2, len(seen) - 1):
        root = tmp_path / f"cut at {cut_at}"
        before, _, _ = fit(make_trainer, root, data(), recorder=Recorder(cut_at), **settings)
        after, weights_after, _ = fit(make_trainer, root, data(), ckpt_path="last", **settings)
        assert min(after) > 1
        assert {**before, **after} == seen
        assert all(torch.equal(value, weights_after[name]) for name, value in whole.items())
    assert not reading()


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_every_stage_has_its_batches_on_the_device_already(stage, make_trainer):
    data = parcels()
    trainer = make_trainer(accelerator=Asynchronous(), max_epochs=1, enable_checkpointing=False)
    getattr(trainer, stage)(Opens(), data if stage == "fit" else [data])
    assert [batch.moved_by for batch in data] == [["footplate-prefetch"]] * 12
    assert not reading()


def test_on_the_cpu_batches_come_at_the_step_and_no_thread_is_made(make_trainer):
    class Alone(fp.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            assert not reading()

    data = parcels()
    make_trainer(max_epochs=1, callbacks=Alone()).fit(Opens(), data)
    assert not any(batch.moved_by for batch in data)


class Counted(Dataset):
    """Records the thread and process that read a row."""

    def __init__(self) -> None:
        self.readers: list[str] = []

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> Any:
        self.readers.append(threading.current_thread().name)
        return tuple(column[index] for column in dataset().tensors)


def test_what_its_author_wrote_and_no_worker_runs_is_run_at_the_step_in_the_main_thread(make_trainer):
    rows, batches = Counted(), list(loader())

    def stream():
        for batch in batches:
            assert threading.current_thread() is threading.main_thread()
            yield batch

    make_trainer(accelerator=Asynchronous()).fit(Classifier(), DataLoader(rows, 10))
    assert set(rows.readers) == {"MainThread"}
    make_trainer(accelerator=Asynchronous(), max_epochs=1, default_root_dir=None).fit(Classifier(), stream())


class Places:
    """Records, for each batch, where hooks run and torch's generator state there. It must be the same on every device."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, float]] = []

    def note(self, hook: str) -> None:
        self.seen.append((hook, threading.current_thread().name, torch.rand(()).item()))


class Hooked(Opens):
    """Overrides some of the batch-transfer hooks."""

    def __init__(self, places: Places, names: str) -> None:
        super().__init__()
        self.places = places
        for name in names.split():
            setattr(self, name, getattr(self, f"my_{name}"))

    def my_on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.places.note("before")
        return batch

    def my_transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.places.note("move")
        return batch

    def my_on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.places.note("after")
        return batch


@pytest.mark.parametrize(
    ("hooks", "ahead"),
    [
        ("on_after_batch_transfer", True),
        ("on_before_batch_transfer", False),
        ("transfer_batch_to_device", False),
        ("on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer", False),
    ],
)
def test_hooks_run_where_and_when_they_do_without_and_only_the_last_lets_batches_go_ahead(hooks, ahead, make_trainer):
    seen = []
    for accelerator in (CPU(), Asynchronous()):
        data, places = parcels(), Places()
        make_trainer(accelerator=accelerator, max_epochs=1, enable_checkpointing=False).fit(Hooked(places, hooks), data)
        seen.append(places.seen)
    assert seen[0] == seen[1]
    assert {thread for _, thread, _ in seen[1]} == {"MainThread"}
    assert any("footplate-prefetch" in batch.moved_by for batch in data) is ahead


def test_no_more_batches_are_taken_than_the_step_will_ask_for(make_trainer):
    data, held_out = parcels(), parcels()
    limits = {"limit_train_batches": 7, "limit_val_batches": 3, "num_sanity_val_steps": 1}
    make_trainer(accelerator=Asynchronous(), max_epochs=2, **limits).fit(Opens(), data, [held_out])
    assert [len(batch.moved_by) for batch in data] == [2] * 7 + [0] * 5
    assert [len(batch.moved_by) for batch in held_out] == [3, 2, 2] + [0] * 9


def test_a_checkpoint_says_which_batch_was_trained_on_last_not_which_was_read(make_trainer, tmp_path):
    class Saves(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            time.sleep(0.02)  # the thread goes as far as it may
            if batch_idx in (3, 9):
                trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    data = parcels()
    make_trainer(accelerator=Asynchronous(), max_epochs=1, callbacks=Saves()).fit(Opens(), data)
    positions = [checkpoint.load(tmp_path / f"{batch}.ckpt")["loader"] for batch in (3, 9)]
    assert positions == [{"epoch": 0, "batch": 4}, {"epoch": 0, "batch": 10}]


def test_replicas_share_batches_that_came_ahead_as_they_do_others(make_trainer):
    models = seeded(), seeded()
    for accelerator, model in zip((CPU(), Asynchronous()), models, strict=True):
        trainer = make_trainer(accelerator=accelerator, devices=2, strategy="replicas", enable_checkpointing=False)
        trainer.fit(model, list(loader(shuffle=False)))
    assert trainer.run.loop.source is not trainer.run.loop.loader
    equal(weights(models[0]), weights(models[1]))


BROKEN = dataset()[50][0]


class Broken(Recorder):
    """A table with a row that can't be read from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False

    def on_train_epoch_start(self, trainer: fp.Trainer, pl_module: Any) -> None:
        self.broken = trainer.current_epoch == 1

    def transform(self, row: dict[str, Any]) -> dict[str, Any]:
        if self.broken and torch.equal(row["x"], BROKEN):
            raise KeyError("gone")
        return row


def test_what_fails_in_the_loader_is_raised_at_the_step_that_would_have_had_the_batch(make_trainer, tmp_path):
    seen, whole, _ = fit(make_trainer, tmp_path / "whole", table_loader(), CPU())
    before = Broken()
    with pytest.raises(KeyError, match="gone"):
        fit(make_trainer, tmp_path / "run", table_loader(before.transform), recorder=before)
    after, weights_after, _ = fit(make_trainer, tmp_path / "run", table_loader(), ckpt_path="last")
    assert 14 < min(after) == max(before.seen) + 1
    assert {**before.seen, **after} == seen
    assert all(torch.equal(value, weights_after[name]) for name, value in whole.items())


class Leaves(fp.Callback):
    """Leaves each epoch after five batches, or the whole run."""

    def __init__(self, run: bool) -> None:
        self.run = run

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 5 and not self.run:
            return -1
        return None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.should_stop or (self.run and batch_idx == 4)


@pytest.mark.parametrize("run", [False, True], ids=["epoch", "run"])
def test_an_epoch_that_is_left_early_leaves_no_thread_and_the_next_begins_afresh(run, make_trainer, tmp_path):
    seen = []
    for name, accelerator in {"cpu": CPU(), "ahead": Asynchronous()}.items():
        recorder = Recorder()
        torch.manual_seed(7)
        trainer = make_trainer(
            accelerator=accelerator, callbacks=[recorder, Leaves(run)], default_root_dir=tmp_path / name
        )
        trainer.fit(Classifier(), worker_loader())
        assert not reading()
        trainer = make_trainer(
            accelerator=accelerator, callbacks=recorder, default_root_dir=tmp_path / name, max_epochs=4 - run
        )
        trainer.fit(Classifier(), worker_loader(), ckpt_path="last")
        seen.append(recorder.seen)
    assert seen[0] == seen[1]
    assert len(seen[0]) == (36 if run else 10 + 24)


def test_ranks_with_fewer_batches_end_the_epoch_for_all(tmp_path):
    def run(accelerator: CPU) -> Any:
        torch.manual_seed(7)
        module = Classifier()
        trainer = fp.Trainer(
            accelerator=accelerator, default_root_dir=tmp_path, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, max_epochs=2, seed=1, devices=2,
        )  # fmt: skip
        batches = list(loader(120, shuffle=False))
        trainer.fit(module, batches[: 12 if trainer.global_rank else 8])
        assert not reading()
        return trainer.global_step, {name: value.numpy() for name, value in module.state_dict().items()}

    (steps, at_step), _ = ranks.run(run, 2, CPU())
    (steps_ahead, ahead), (_, other) = ranks.run(run, 2, Asynchronous())
    assert steps == steps_ahead == 16
    assert all(
        np.array_equal(value, ahead[name]) and np.array_equal(value, other[name]) for name, value in at_step.items()
    )


class Clock:
    """A clock that advances only when a stand-in takes time."""

    now = 0.0

    def take(self, seconds: float) -> None:
        self.now += seconds


class Busy(fp.Callback):
    """Trains for a while in each step, and validates for longer."""

    def __init__(self, clock: Clock, step_s: float) -> None:
        self.clock, self.step_s = clock, step_s

    def on_train_batch_end(self, *_: Any) -> None:
        self.clock.take(self.step_s)

    def on_validation_epoch_start(self, *_: Any) -> None:
        self.clock.take(0.5)


class Slow:
    """Takes time for each of six batches."""

    def __init__(self, clock: Clock, batch_s: float) -> None:
        self.clock, self.batch_s = clock, batch_s

    def __iter__(self):
        for batch in loader(60, shuffle=False):
            self.clock.take(self.batch_s)
            yield batch


@pytest.mark.parametrize(("batch_s", "step_s", "share"), [(0.1, 0.0, 1.0), (0.1, 0.3, 0.25), (0.0, 0.1, 0.0)])
def test_the_share_of_time_that_went_into_waiting_is_logged_if_asked_for(
    batch_s, step_s, share, make_trainer, monkeypatch
):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    callbacks = [Busy(clock, step_s), fp.DataWaitMonitor()]
    trainer = make_trainer(max_epochs=1, callbacks=callbacks, log_every_n_steps=4, enable_checkpointing=False)
    trainer.fit(Classifier(), Slow(clock, batch_s), loader(20))
    assert float(trainer.callback_metrics["data_wait"]) == pytest.approx(share, abs=1e-6)


class Own(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


class Drawn(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(torch.randperm(120).tolist())

    def __len__(self):
        return 120


def keeps_state() -> Any:
    class Stateful(Own):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    return Stateful(Stream(), None, num_workers=2)


def test_only_of_these_loaders_may_any_thread_take_the_batches():
    elsewhere = [
        table_loader(),
        worker_loader(),
        list(loader()),
        DataLoader(Stream(), None, num_workers=2),
        DataLoader(dataset(), 10, sampler=Drawn(), num_workers=2),  # whose order is drawn before the epoch, in training
    ]
    here = [loader(), (batch for batch in loader()), Own(dataset(), 10, num_workers=2, shuffle=True), keeps_state()]
    assert [made_in_background(adapt(source, seed=1)) for source in elsewhere] == [True] * 5
    assert [made_in_background(source) for source in elsewhere] == [True] * 4 + [False]
    assert [made_in_background(adapt(source, seed=1)) for source in (here[0], here[1], here[3])] == [False] * 3
    assert [made_in_background(source) for source in here] == [False] * 4
    assert made_in_background(adapt(worker_loader(), seed=1, shuffle=False))


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Marked:
    rows: Any
    mask: Any = None

    def __post_init__(self) -> None:
        self.mask = self.rows[0] > 0


class Wrapped(UserDict):
    """A mapping that moves itself, as transformers' BatchEncoding does."""

    def to(self, device: torch.device) -> Wrapped:
        self["moved"] = True
        return Wrapped({name: value.to(device) for name, value in self.items() if name != "moved"})


class InPlace:
    """An object that moves itself, and returns nothing."""

    def __init__(self) -> None:
        self.x = torch.ones(2)

    def to(self, device: torch.device) -> None:
        self.x = self.x.to(device)


def test_an_object_with_a_to_of_its_own_moves_itself():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    wrapped, parcel = Wrapped(x=torch.ones(2)), InPlace()
    moved = to_device({"packed": packed, "many": [wrapped, parcel]}, torch.device("meta"))
    assert moved["packed"].data.device.type == "meta"
    assert moved["packed"].batch_sizes.device.type == "cpu"
    assert wrapped["moved"] is True
    assert moved["many"][0]["x"].device.type == "meta"
    assert moved["many"][1] is parcel
    assert parcel.x.device.type == "meta"
    assert next(movable([packed, wrapped, torch.float32])) is packed


def test_what_is_moved_of_a_batch_is_found_again_wherever_it_is():
    one, two, parcel = torch.ones(2), torch.zeros(3), Parcel(None)
    batch = {"a": [one, "text"], "b": Point(two, (3, None)), "c": parcel}
    moved: list[Any] = []
    map_tensors(batch, lambda tensor: moved.append(tensor) or tensor)
    tensors = list(movable(batch))
    assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in moved] == [id(one), id(two), id(parcel)]
    marked = Marked([one])
    assert [id(tensor) for tensor in movable(marked)] == [id(one), id(marked.mask)]
