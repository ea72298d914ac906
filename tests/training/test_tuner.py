"""Searches for a learning rate and a batch size: their results, and the unchanged state afterwards."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.small import Classifier, dataset, loader
from torch.utils.data import DataLoader, RandomSampler

import footplate as fp
from footplate.core import rng
from footplate.training.tuner import LRFinder, largest


class Counts(Classifier):
    """Keeps state outside of its state dict, and draws from every generator."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lr = self.hparams.lr
        self.steps: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps.append(random.random() + float(np.random.rand()))
        return super().training_step([batch["x"], batch["y"]] if isinstance(batch, dict) else batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def data(kind: str) -> Any:
    if kind == "table":
        rows = dataset()
        table = fp.Table({"x": list(rows.tensors[0].numpy()), "y": rows.tensors[1].numpy()})
        return fp.Loader(table, 10, shuffle=True)
    generator = torch.Generator().manual_seed(3)
    return DataLoader(dataset(), 10, sampler=RandomSampler(dataset(), generator=generator), generator=generator)


class Losses(fp.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(trainer.callback_metrics["train_loss_step"].item().hex())


@pytest.mark.parametrize("kind", ["torch", "table"])
def test_fit_after_a_search_is_fit_without_one_bit_for_bit(make_trainer: Any, tmp_path: Any, kind: str) -> None:
    results = []
    for searches in (False, True):
        rng.seed_globals(5)
        module, batches, losses = Counts(), data(kind), Losses()
        trainer = make_trainer(callbacks=[losses], default_root_dir=tmp_path / str(searches))
        if searches:
            before, generators = copy.deepcopy(module.state_dict()), rng.capture()
            result = fp.Tuner(trainer).lr_find(module, batches, num_training=30, update_attr=False)
            assert result is not None
            assert len(result.results["lr"]) == len(result.results["loss"]) == 30
            assert module.steps == []
            assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
            assert torch.equal(rng.capture()["torch"], generators["torch"])
            assert rng.capture()["numpy"][2] == generators["numpy"][2]
            assert (trainer.global_step, trainer.stage, trainer.module) == (0, None, None)
            assert not trainer.run_dir.exists()
        trainer.fit(module, batches)
        results.append((losses.seen, module.steps, torch.rand(1).item(), module.state_dict()))
    assert results[0][:3] == results[1][:3]
    assert all(torch.equal(value, results[1][3][name]) for name, value in results[0][3].items())


def test_the_suggestion_becomes_the_attribute_and_the_hyperparameter(make_trainer: Any) -> None:
    module = Counts()
    result = fp.Tuner(make_trainer()).lr_find(module, loader(), num_training=40, early_stop_threshold=None)
    assert result is not None
    assert module.lr == module.hparams.lr == result.suggestion()
    assert result.results["lr"][0] == 1e-8
    assert result.results["lr"][-1] == pytest.approx(1.0)


def test_a_search_ends_where_the_loss_diverges(make_trainer: Any) -> None:
    result = fp.Tuner(make_trainer()).lr_find(
        Counts(), loader(), min_lr=1.0, max_lr=1e6, num_training=60, update_attr=False, early_stop_threshold=2.0
    )
    assert result is not None
    assert 1 < len(result.results["loss"]) < 60


def test_too_few_losses_make_no_suggestion(caplog: Any) -> None:
    finder = LRFinder("linear", 0.1, 1.0, 5)
    finder.results = {"lr": [0.1, 0.2, 0.3], "loss": [3.0, 2.0, float("nan")]}
    assert finder.suggestion() is None
    assert "too few losses" in caplog.text
    assert finder.suggestion(skip_begin=0) == 0.1


class Rows(fp.DataModule):
    """Makes its loader with the batch size that a search sets."""

    def __init__(self, rows: int = 600, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return loader(self.hparams.rows, self.batch_size)

    val_dataloader = train_dataloader


class Full(Counts):
    """Fails like torch when a batch has more rows than the memory holds."""

    said = (
        "[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
    )
    room = 100

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > self.room:
            raise RuntimeError(self.said)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("mode", "expected"), [("power", 64), ("binsearch", 95)])
def test_the_largest_batch_that_fits_becomes_the_attribute(make_trainer: Any, mode: Any, expected: int) -> None:
    module, rows = Full(), Rows()
    before = copy.deepcopy(module.state_dict())
    assert fp.Tuner(make_trainer()).scale_batch_size(module, datamodule=rows, mode=mode) == expected
    assert (rows.batch_size, rows.hparams.batch_size) == (expected, expected)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.steps == []


def test_no_batch_is_larger_than_the_data(make_trainer: Any) -> None:
    assert fp.Tuner(make_trainer()).scale_batch_size(Counts(), datamodule=Rows(20), method="validate") == 32


def test_another_error_ends_the_search_and_leaves_the_size(make_trainer: Any) -> None:
    class Fails(Full):
        said = "a mistake of the user's"

    rows = Rows()
    with pytest.raises(RuntimeError, match="a mistake of the user's"):
        fp.Tuner(make_trainer()).scale_batch_size(Fails(), datamodule=rows)
    assert rows.batch_size == 2


def test_a_search_of_no_trials_takes_the_first_size(make_trainer: Any) -> None:
    rows = Rows()
    assert fp.Tuner(make_trainer()).scale_batch_size(Classifier(), datamodule=rows, init_val=5, max_trials=0) == 5
    assert rows.batch_size == 5


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 64), st.integers(1, 256), st.booleans())
def test_a_search_ends_with_a_size_that_was_tried_and_fits(
    room: int, rows: int, first: int, most: int, narrow: bool
) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= room

    batch_size = largest(fits, lambda: rows, first, narrow, 99, most)
    assert len(set(tried)) == len(tried)
    if batch_size is None:
        assert room == 0
        return
    assert batch_size in tried
    assert batch_size <= min(room, most)
    if narrow and batch_size < min(rows, most):
        assert batch_size == room
    if batch_size < min(rows, most):
        assert 2 * batch_size > room or first > room


class TwoOptimizers(Counts):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


REFUSED: dict[str, Any] = {
    "two optimizers": (lambda tuner: tuner.lr_find(TwoOptimizers(), loader(), update_attr=False), "with several"),
    "no attribute": (lambda tuner: tuner.lr_find(Counts(), loader(), attr_name="rate"), "Counts has no rate"),
    "another method": (lambda tuner: tuner.lr_find(Counts(), method="test"), 'for method="fit"'),
    "a loader": (lambda tuner: tuner.scale_batch_size(Counts(), loader()), r"Define train_dataloader\(\)"),
    "no size": (lambda tuner: tuner.scale_batch_size(Counts()), "no attribute batch_size"),
    "an iterator": (lambda tuner: tuner.lr_find(Counts(), iter(loader())), "would use up"),
    "no room": (
        lambda tuner: tuner.scale_batch_size(type("None_", (Full,), {"room": 0})(), datamodule=Rows()),
        "not even a batch of one row",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_searched_is_refused(make_trainer: Any, case: Any) -> None:
    call, said = case
    with pytest.raises(fp.ConfigError, match=said):
        call(fp.Tuner(make_trainer()))


def test_a_search_ends_where_every_step_is_skipped(make_trainer: Any) -> None:
    class Skips(Counts):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    result = fp.Tuner(make_trainer()).lr_find(Skips(), loader(), num_training=15, update_attr=False)
    assert result is not None
    assert result.results["loss"] == []
