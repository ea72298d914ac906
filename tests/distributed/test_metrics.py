"""Metrics of several ranks: the values of one process, equal on all ranks, even if ranks log different names."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from models import ranks
from models.small import dataset
from torch.utils.data import DataLoader

from footplate.distributed.metric_reduction import Part, merge, merge_states, reduced
from footplate.training.metrics import MetricLog

from .common import Plain, loader, make, seeded

VALUES = st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 9)), max_size=8)


@given(st.lists(VALUES, min_size=1, max_size=4), st.sampled_from(["mean", "sum", "min", "max"]))
def test_merged_parts_are_what_one_rank_would_have_collected(parts, reduce_fx):
    def collected(values: Any) -> MetricLog:
        log = MetricLog(torch.nn.Module(), by_step=False)
        for value, weight in values:
            log.log("x", value, batch_size=weight, reduce_fx=reduce_fx)
        return log

    logs = [collected(values) for values in parts]
    whole = collected([pair for values in parts for pair in values]).epoch_values().callback
    merged = reduced(reduce_fx, merge(reduce_fx, [e.part() for log in logs for e in log._entries.values()]))
    assert (merged is None) == (not whole)
    if whole:
        assert merged == pytest.approx(whole["x"], rel=1e-9, abs=1e-6)


def test_what_is_no_number_on_one_rank_is_none_in_the_extreme():
    assert math.isnan(merge("max", [Part(1.0, 1.0), Part(math.nan, 1.0), Part(2.0, 1.0)]).total)


class Rich(Plain):
    """Logs in every way, some values on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.seen = torchmetrics.CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("rank", float(self.global_rank), on_step=True, on_epoch=False, sync_dist=True)
        self.log("own", float(self.global_rank), on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        first = batch[0][:, 0]
        self.log("sum", first.sum(), reduce_fx="sum")
        self.log("least", first.min(), reduce_fx="min")
        self.log("most", first.max(), reduce_fx="max")
        self.log("spread", first.mean(), reduce_fx=lambda values: values.max() - values.min())
        self.accuracy.update(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)
        self.seen.update(first)
        if self.global_rank == 0:
            self.log("of rank 0", 5.0, rank_zero_only=True)
        else:
            self.log("of rank 1", 7.0)

    def on_validation_epoch_end(self) -> None:
        self.log("rows", float(self.seen.compute().numel()))
        self.seen.reset()


def fit(root, batch_size: int, rows: int) -> dict[str, float]:
    trainer = make(root, log_every_n_steps=1)
    data = DataLoader(dataset(rows), batch_size)
    trainer.fit(seeded(Rich), loader(48, batch_size), data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("rows", [33, 1])
def test_every_kind_of_metric_is_that_of_one_process_and_the_same_on_all_ranks(rows, tmp_path):
    alone = fit(tmp_path / "alone", 16, rows)
    first, second = ranks.run(lambda: fit(tmp_path / "two", 8, rows), 2)
    for name in ("val_loss", "sum", "least", "most", "accuracy", "rows", "train_loss_epoch"):
        assert first[name] == second[name]
        assert first[name] == pytest.approx(alone[name], rel=1e-4), name
    assert first["rows"] == rows
    assert (first["rank"], second["rank"]) == (0.5, 0.5)
    assert (first["own"], second["own"]) == (0.0, 1.0)
    if rows > 1:
        assert first["of rank 0"] == second["of rank 0"] == 5.0
        assert first["spread"] == second["spread"] > 0
    assert first["of rank 1"] == second["of rank 1"] == 7.0


class Lists(Plain):
    """Has torchmetrics objects that keep their inputs: joined to one tensor, or in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.auroc = torchmetrics.classification.MulticlassAUROC(3)
        self.retrieval = torchmetrics.retrieval.RetrievalMRR()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        chances = self.net(batch[0]).softmax(1)
        self.auroc.update(chances, batch[1])
        self.retrieval.update(chances[:, 0], batch[1] == 0, indexes=batch[1] * 0)
        self.log("auroc", self.auroc)
        self.log("retrieval", self.retrieval)


@pytest.mark.parametrize("rows", [1, 33, 40])
def test_a_metric_that_keeps_what_it_is_given_is_gathered_from_ranks_with_any_number_of_batches(rows, tmp_path):
    def run(batch_size: int) -> dict[str, float]:
        data = DataLoader(dataset(rows), batch_size)
        (metrics,) = make(tmp_path).validate(seeded(Lists), data, verbose=False)
        return metrics

    alone = run(16)
    first, second = ranks.run(lambda: run(8), 2)
    assert first == second
    assert first == pytest.approx(alone, rel=1e-5)


def test_the_states_of_two_ranks_merge_to_one_with_the_same_totals():
    def state(values: list[float], classes: list[int]) -> tuple[Any, torch.nn.Module]:
        module = torch.nn.Module()
        module.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        module.seen = torchmetrics.CatMetric()
        module.top = torchmetrics.MaxMetric()
        log = MetricLog(module, by_step=False)
        for value, number in zip(values, classes, strict=True):
            log.log("x", value, batch_size=number + 1)
            module.accuracy.update(torch.tensor([number]), torch.tensor([1]))
            module.seen.update(value)
            module.top.update(value)
            for name in ("accuracy", "seen", "top"):
                log.log(name, getattr(module, name))
        return log.state_dict(), module

    one, module = state([1.0, 2.0], [1, 1])
    two, _ = state([5.0], [0])
    merged = merge_states([one, two], lambda path: module.get_submodule(path)._reductions)
    log = MetricLog(module, by_step=False)
    log.load_state_dict(merged)
    module.seen.compute()
    assert sorted(module.seen.compute().tolist()) == [1.0, 2.0, 5.0]
    log._entries.pop("seen")
    totals = log.epoch_values().callback
    assert totals == {"x": pytest.approx((1 * 2 + 2 * 2 + 5 * 1) / 5), "accuracy": pytest.approx(2 / 3), "top": 5.0}


class Averaged(Plain):
    """Logs the mean of its losses by a torchmetrics object."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


def test_a_torchmetrics_object_is_not_sharded_with_its_module(tmp_path):
    def run() -> tuple[float, float]:
        trainer = make(tmp_path, strategy="fsdp", max_epochs=1)
        trainer.fit(seeded(Averaged), loader(48))
        return float(trainer.callback_metrics["mean"]), float(trainer.callback_metrics["train_loss"])

    first, second = ranks.run(run, 2)
    assert first == second
    assert first[0] == pytest.approx(first[1])
