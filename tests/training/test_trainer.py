"""The trainer's arguments: each does what its line in the docstring says."""

from __future__ import annotations

import copy
import csv
import math
import os
import pickle
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from models.small import Classifier, dataset, loader
from torch.utils.data import DataLoader, IterableDataset

import footplate as fp
from footplate import checkpoint
from footplate.training.lock import only_writer


class Watch(fp.Callback):
    """Records the progress of training and evaluation."""

    def __init__(self) -> None:
        self.labels: list[list[int]] = []
        self.losses: list[float] = []
        self.validated_at: list[int] = []
        self.evaluated: list[str] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.labels.append(batch[1].tolist())
        self.losses.append(float(outputs))

    def on_validation_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.validated_at.append(trainer.progress.batches)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.evaluated.append("sanity" if trainer.sanity_checking else "val")

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.evaluated.append("test")

    def on_predict_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.evaluated.append("predict")


class Endless(IterableDataset):
    """A data set without a length and without an end."""

    def __init__(self, rows: int = 10**9) -> None:
        self.rows = rows

    def __iter__(self):
        x, y = dataset().tensors
        return ((x[i % 120], y[i % 120]) for i in range(self.rows))


@pytest.fixture
def fit(make_trainer):
    """Fit a model on 12 batches of 10, validate on 4. Return the trainer and the record."""

    def run(model: Any = None, train: Any = None, val: Any = "4 batches", ckpt_path=None, callbacks=(), **kwargs):
        watch = Watch()
        trainer = make_trainer(callbacks=[watch, *callbacks], **kwargs)
        torch.manual_seed(0)
        model = Classifier() if model is None else model() if isinstance(model, type) else model
        val_data = loader(40, shuffle=False) if isinstance(val, str) else val
        trainer.fit(model, loader() if train is None else train, val_data, ckpt_path=ckpt_path)
        return trainer, watch

    return run


# How long


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_epochs": 3}, 36),
        ({"max_epochs": 0}, 0),
        ({"max_epochs": -1, "max_steps": 17}, 17),
        ({"max_epochs": 1, "max_steps": 17}, 12),
        ({"max_epochs": 2, "max_steps": 5}, 5),
        ({"max_epochs": None, "max_steps": 30}, 30),
        ({"max_epochs": 2, "max_steps": 0}, 0),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, 6),
        ({"max_epochs": 2, "accumulate_grad_batches": 5}, 6),
        ({"max_epochs": 9, "max_steps": 4, "accumulate_grad_batches": 5}, 4),
    ],
)
def test_max_epochs_and_max_steps(settings, steps, fit):
    assert fit(**settings)[0].global_step == steps


def test_without_any_limit_a_thousand_epochs_are_assumed_and_said(make_trainer):
    class Ends(fp.Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.should_stop = True

    trainer = make_trainer(max_epochs=None, callbacks=[Ends()])
    assert trainer.max_epochs is None
    with pytest.warns(UserWarning, match=r"max_epochs=1000 is assumed"):
        trainer.fit(Classifier(), loader())
    assert trainer.max_epochs == 1000


@pytest.mark.parametrize("limit", [{"max_steps": 1}, {"callbacks": [fp.Timer(timedelta(milliseconds=1))]}])
def test_with_another_limit_epochs_have_none(limit, make_trainer):
    trainer = make_trainer(max_epochs=None, **limit)
    trainer.fit(Classifier(), loader())
    assert trainer.max_epochs == -1


@pytest.mark.parametrize("max_time", [timedelta(milliseconds=250), {"milliseconds": 250}])
def test_max_time_ends_training_in_time_and_says_nothing_of_an_error(max_time, fit):
    class Slow(Classifier):
        def training_step(self, batch, batch_idx):
            time.sleep(0.02)
            return super().training_step(batch, batch_idx)

    made, _ = fit(Slow, val=None, max_epochs=-1, max_time=max_time)
    assert 1 <= made.global_step <= 14


def test_max_time_counts_earlier_attempts(fit):
    class Slow(Classifier):
        def training_step(self, batch, batch_idx):
            time.sleep(0.01)
            return super().training_step(batch, batch_idx)

    limit = {"milliseconds": 150}
    first, _ = fit(Slow, val=None, max_epochs=-1, max_time=limit)
    again, watch = fit(Slow, val=None, max_epochs=-1, max_time=limit, ckpt_path="last")
    assert first.global_step > 0
    assert len(watch.losses) <= 1
    assert again.global_step - first.global_step <= 1


@pytest.mark.parametrize(("text", "seconds"), [("00:00:00:30", 30), ("01:02:03:04", 93784)])
def test_max_time_as_text(text, seconds, make_trainer):
    (timer,) = (one for one in make_trainer(max_time=text).callbacks if isinstance(one, fp.Timer))
    assert round(timer.time_remaining()) == seconds


@pytest.mark.parametrize("text", ["1h", "00:00:00", timedelta(0), {"fortnights": 1}])
def test_a_max_time_that_is_none_is_refused(text, make_trainer):
    with pytest.raises(fp.ConfigError, match=r"max_time=.*DD:HH:MM:SS"):
        make_trainer(max_time=text)


def test_should_stop_ends_after_the_present_step(fit):
    class Stops(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = trainer.global_step == 7

    assert fit(callbacks=[Stops()], val=None)[0].global_step == 7


@pytest.mark.parametrize(("settings", "steps"), [({"min_epochs": 2}, 24), ({"min_steps": 15}, 15), ({}, 3)])
def test_min_epochs_and_min_steps_are_reached_before_a_stop(settings, steps, fit):
    class Stops(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 3:
                trainer.should_stop = True

    assert fit(callbacks=[Stops()], max_epochs=5, **settings)[0].global_step == steps


# How much of the data


@pytest.mark.parametrize(("limit", "batches"), [(5, 5), (0.5, 6), (1.0, 12), (1, 1), (100, 12), (None, 12)])
def test_limit_train_batches(limit, batches, fit):
    made, watch = fit(limit_train_batches=limit, max_epochs=2)
    assert made.num_training_batches == batches
    assert len(watch.losses) == 2 * batches


@pytest.mark.parametrize(("limit", "batches"), [(3, 3), (0.5, 2), (1.0, 4), (0, 0), (0.0, 0)])
def test_limit_val_batches(limit, batches, fit):
    _, watch = fit(limit_val_batches=limit, max_epochs=1, num_sanity_val_steps=0)
    assert watch.evaluated == ["val"] * batches


def test_a_limit_of_zero_trains_nothing(fit, caplog):
    model = Classifier()
    before = copy.deepcopy(model.state_dict())
    with caplog.at_level("INFO", "footplate"):
        made, watch = fit(model, limit_train_batches=0, max_epochs=2, val_check_interval=3)
    assert "Nothing is trained, since limit_train_batches=0." in caplog.messages
    assert (made.global_step, made.current_epoch, watch.losses) == (0, 0, [])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_limit_of_zero_evaluates_nothing(stage, make_trainer):
    limit = {f"limit_{'val' if stage == 'validate' else stage}_batches": 0}
    assert getattr(make_trainer(**limit), stage)(Classifier(), loader()) == []


def test_val_check_interval_is_not_checked_where_nothing_is_validated(fit):
    made, _ = fit(limit_val_batches=0, limit_train_batches=2, val_check_interval=100, max_epochs=1)
    assert made.global_step == 2


@pytest.mark.parametrize("stage", ["test", "predict"])
@pytest.mark.parametrize(("limit", "batches"), [(3, 3), (0.25, 1), (1.0, 4)])
def test_limits_of_test_and_predict(stage, limit, batches, make_trainer):
    class Predicts(Classifier):
        def predict_step(self, batch, batch_idx):
            return self(batch[0])

    watch = Watch()
    trainer = make_trainer(callbacks=[watch], **{f"limit_{stage}_batches": limit})
    getattr(trainer, stage)(Predicts(), loader(40))
    assert watch.evaluated == [stage] * batches


def test_an_endless_source_is_limited_by_a_number_of_batches(fit):
    made, watch = fit(train=DataLoader(Endless(), 10), limit_train_batches=7, max_epochs=2)
    assert made.global_step == 14
    assert len(watch.validated_at) == 2


def test_a_source_of_unknown_length_ends_when_it_ends(fit):
    made, watch = fit(train=DataLoader(Endless(55), 10), max_epochs=2, accumulate_grad_batches=4)
    assert made.global_step == 4
    assert watch.validated_at == [6, 12]


def test_overfit_batches_trains_on_the_same_few_batches(fit):
    _, watch = fit(overfit_batches=2, max_epochs=3)
    assert len(watch.labels) == 6
    assert watch.labels[:2] == watch.labels[2:4] == watch.labels[4:]
    assert watch.labels[0] == dataset().tensors[1][:10].tolist()


def test_overfit_batches_as_a_part(fit):
    assert fit(overfit_batches=0.25, max_epochs=1)[0].global_step == 3


@pytest.mark.parametrize(("given", "batches"), [(True, 1), (3, 3)])
def test_fast_dev_run_runs_every_loop_and_leaves_nothing_behind(given, batches, make_trainer, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    watch = Watch()
    trainer = make_trainer(
        fast_dev_run=given,
        callbacks=[watch, fp.ModelCheckpoint(monitor="val_loss"), fp.EarlyStopping("val_loss")],
        logger=[fp.CSV()],
        default_root_dir=None,
        max_epochs=100,
        accumulate_grad_batches=2,
        val_check_interval=0.5,
    )
    trainer.fit(Classifier(), loader(), loader(40))
    trainer.test(Classifier(), loader(40))
    assert len(watch.losses) == batches
    assert watch.evaluated == ["val"] * batches + ["test"] * batches
    assert not list(tmp_path.iterdir())
    assert trainer.fast_dev_run is given
    assert isinstance(trainer.checkpoint_callback, fp.ModelCheckpoint)  # what was given stays


# When it validates


@pytest.mark.parametrize(
    ("settings", "at"),
    [
        ({}, [12, 24]),
        ({"val_check_interval": 0.25}, [3, 6, 9, 12, 15, 18, 21, 24]),
        ({"val_check_interval": 1.0}, [12, 24]),
        ({"val_check_interval": 5}, [5, 10, 17, 22]),
        ({"val_check_interval": 1, "max_epochs": 1}, list(range(1, 13))),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, [5, 10, 15, 20]),
        ({"val_check_interval": 20, "check_val_every_n_epoch": None}, [20]),
        ({"check_val_every_n_epoch": 2}, [24]),
        ({"check_val_every_n_epoch": 2, "val_check_interval": 0.5}, [18, 24]),
        ({"check_val_every_n_epoch": 3}, []),
        ({"accumulate_grad_batches": 4, "val_check_interval": 6}, [6, 12, 18, 24]),
    ],
)
def test_when_validation_is_due(settings, at, fit):
    assert fit(**settings)[1].validated_at == at


@pytest.mark.parametrize(("steps", "tried"), [(0, 0), (2, 2), (3, 3), (10, 4), (-1, 4)])
def test_num_sanity_val_steps(steps, tried, fit):
    made, watch = fit(num_sanity_val_steps=steps, max_epochs=1)
    assert watch.evaluated == ["sanity"] * tried + ["val"] * 4
    assert made.num_sanity_val_steps == (math.inf if steps == -1 else steps)


def test_a_checkpoint_saved_after_training_leaves_no_thread(fit, tmp_path):
    before = set(threading.enumerate())
    made, _ = fit(max_epochs=1)
    made.save_checkpoint(tmp_path / "after.ckpt")
    assert set(threading.enumerate()) <= before


def test_the_sanity_check_leaves_no_metrics(make_trainer):
    seen: dict[str, Any] = {}

    class Look(fp.Callback):
        def on_train_start(self, trainer, pl_module):
            seen.update(trainer.callback_metrics)

    make_trainer(callbacks=[Look()], max_epochs=1).fit(Classifier(), loader(), loader(40))
    assert seen == {}


def test_a_mistake_in_validation_is_found_before_training(make_trainer):
    class Mistaken(Classifier):
        def validation_step(self, batch, batch_idx):
            raise ZeroDivisionError

    trainer = make_trainer()
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Mistaken(), loader(), loader(40))
    assert trainer.global_step == 0


# How it learns


def final(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


class Plain(Classifier):
    """No dropout, plain SGD: its result can be computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = torch.nn.Identity()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_accumulated_batches_are_one_large_batch(make_trainer):
    models = []
    for batch_size, accumulate in ((10, 4), (40, 1)):
        torch.manual_seed(0)
        models.append(Plain())
        trainer = make_trainer(accumulate_grad_batches=accumulate, max_epochs=3)
        trainer.fit(models[-1], loader(batch_size=batch_size, shuffle=False))
        assert trainer.global_step == 9
    assert torch.allclose(final(models[0]), final(models[1]), atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "measure"),
    [("norm", lambda grads: torch.linalg.vector_norm(grads)), ("value", lambda grads: grads.abs().max())],
)
def test_gradients_are_clipped_by_norm_or_value_and_only_when_they_are_larger(algorithm, measure, make_trainer):
    class Measures(Plain):
        before: list[float] = []  # noqa: RUF012
        after: list[float] = []  # noqa: RUF012

        def gradients(self) -> torch.Tensor:
            return torch.cat([p.grad.reshape(-1) for p in self.parameters()])

        def on_before_optimizer_step(self, optimizer):
            self.before.append(float(measure(self.gradients())))

        def on_before_zero_grad(self, optimizer):
            if self.net[0].weight.grad is not None:
                self.after.append(float(measure(self.gradients())))

    model = Measures()
    model.before, model.after = [], []
    limit = 0.8 if algorithm == "norm" else 0.3
    make_trainer(max_epochs=2, gradient_clip_val=limit, gradient_clip_algorithm=algorithm).fit(model, loader())
    assert max(model.before) > limit > min(model.before)
    for before, after in zip(model.before, model.after, strict=False):
        assert after == pytest.approx(min(before, limit), rel=1e-3)


def test_the_same_seed_trains_the_same_and_another_does_not(make_trainer):
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(0)
        model = Classifier()
        make_trainer(seed=seed, max_epochs=1).fit(model, loader())
        results.append(final(model))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_what_happened_before_fit_has_no_influence(make_trainer):
    results = []
    for draws in (0, 1000):
        torch.manual_seed(0)
        model = Classifier()
        torch.rand(draws)
        make_trainer(max_epochs=1).fit(model, loader())
        results.append(final(model))
    assert torch.equal(*results)


def test_deterministic_asks_torch_for_it(make_trainer):
    try:
        make_trainer(deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        make_trainer(deterministic="warn")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        make_trainer(deterministic=False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    assert not torch.are_deterministic_algorithms_enabled()


def test_detect_anomaly_is_on_while_training_and_off_after(fit):
    seen = []

    class Looks(Classifier):
        def training_step(self, batch, batch_idx):
            seen.append(torch.is_anomaly_enabled())
            return super().training_step(batch, batch_idx)

    fit(Looks, detect_anomaly=True, max_epochs=1)
    assert set(seen) == {True}
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize("inference_mode", [True, False])
def test_evaluation_is_without_gradients_by_inference_mode_or_no_grad(inference_mode, make_trainer):
    seen = []

    class Looks(Classifier):
        def validation_step(self, batch, batch_idx):
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), self.training))

    make_trainer(inference_mode=inference_mode).validate(Looks(), loader(40))
    assert set(seen) == {(inference_mode, False, False)}


def test_what_validation_inside_fit_makes_can_be_used_in_training(make_trainer):
    class Calibrates(Classifier):
        scale = torch.ones(1)

        def training_step(self, batch, batch_idx):
            return (self(batch[0]) * self.scale).square().mean()

        def validation_step(self, batch, batch_idx):
            self.scale = 2 * batch[0].std().reshape(1)

    trainer = make_trainer(max_epochs=2)
    trainer.fit(Calibrates(), loader(), loader(40))
    assert trainer.status == "finished"


def test_compile_options_reach_torch_and_training_is_the_same(make_trainer):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    results = []
    for options in (False, {"backend": backend}):
        torch.manual_seed(0)
        model = Plain()
        make_trainer(compile=options, max_epochs=1).fit(model, loader())
        results.append(final(model))
        assert set(model.state_dict()) == set(Plain().state_dict())
    assert graphs
    assert torch.equal(*results)


class ManyChildren(fp.Module):
    """Twelve layers, each of other sizes than the others."""

    def __init__(self) -> None:
        super().__init__()
        for size in range(12):
            setattr(self, f"layer{size}", torch.nn.Linear(8 + size, 9 + size))

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.children():
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_each_of_many_children_is_compiled_once_also_in_later_calls(make_trainer):
    """torch.compile compiles a code object eight times, and then runs it eagerly."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    for _ in range(3):
        make_trainer(compile={"backend": backend}, max_epochs=1, limit_train_batches=2).fit(ManyChildren(), loader())
        assert len(compiled) == 12


@pytest.mark.slow
def test_compiled_for_real_it_trains_the_same(make_trainer):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Plain()
        make_trainer(compile=compiled, max_epochs=1).fit(model, loader())
        results.append(final(model))
    assert torch.allclose(*results, atol=1e-5)


class OwnForward(Classifier):
    """Computes something in `forward` itself, which only a compiled `forward` compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(x) * self.scale

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


class Graphs:
    """A backend that keeps the graphs it compiles. Lightning puts it on the module, so that a module's pickle holds it."""

    kept: ClassVar[list[torch.fx.GraphModule]] = []

    def __call__(self, graph, inputs):
        self.kept.append(graph)
        return graph.forward


def test_a_module_that_torch_compile_returned_is_trained_compiled(make_trainer):
    graphs, backend = Graphs.kept, Graphs()
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = OwnForward()
        model = torch.compile(module, backend=backend) if compiled else module
        trainer = make_trainer(max_epochs=1)
        trainer.fit(model, loader(), loader(40))
        results = trainer.validate(model, loader(40), verbose=False), trainer.test(model, loader(40), verbose=False)
        predictions = torch.cat(trainer.predict(model, loader(40)))
        saved = checkpoint.load(trainer.checkpoint_callback.best_model_path)["state_dict"]
        found.append((final(module), results, predictions, saved))
        assert trainer.module is module
        assert list(saved) == list(OwnForward().state_dict())
        assert trainer.lightning_module is module
        module.eval()
        for copied in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
            assert torch.equal(copied(dataset(8).tensors[0]), module(dataset(8).tensors[0]))

    eager, compiled = found
    assert any("scale" in str(node) for graph in graphs for node in graph.graph.nodes)
    assert torch.equal(eager[0], compiled[0])
    assert eager[1] == compiled[1]
    assert torch.equal(eager[2], compiled[2])
    before = len(graphs)
    trainer.fit(model, loader())  # what is compiled stays so
    assert len(graphs) <= before + 1


@pytest.mark.slow
def test_a_compiled_module_is_compiled_in_every_rank(make_trainer):
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = Seen()
        trainer = make_trainer(max_epochs=1, devices=2)
        trainer.fit(torch.compile(module, backend="aot_eager") if compiled else module, loader())
        assert trainer.module is module
        assert module.compiled.tolist() == [float(compiled)]
        found.append(final(module))
    assert torch.allclose(*found, atol=1e-6)


class Seen(OwnForward):
    """Records whether its `forward` runs compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("compiled", torch.zeros(1))

    def forward(self, x):
        if torch.compiler.is_compiling():
            self.compiled.fill_(1.0)
        return super().forward(x)


def test_a_compiled_module_is_refused_where_nothing_is_compiled(make_trainer):
    with pytest.raises(fp.ConfigError, match='strategy="replicas"'):
        make_trainer(strategy="replicas", devices=2).fit(torch.compile(Classifier(), backend="eager"), loader())


# What it is made of


def test_the_older_spellings_are_understood_with_one_line_each(make_trainer, monkeypatch):
    with pytest.warns(FutureWarning, match="gpus"), pytest.raises(fp.ConfigError, match="cuda"):
        make_trainer(accelerator="auto", gpus=1)
    with pytest.warns(FutureWarning, match="tpu_cores"), pytest.raises(fp.ConfigError, match="tpu"):
        make_trainer(accelerator="auto", tpu_cores=8)
    monkeypatch.setenv("XLA_USE_BF16", "1")
    with pytest.warns(FutureWarning, match="XLA_USE_BF16"):
        assert make_trainer().precision.name == "bf16-true"


class Rows(fp.Logger):
    def __init__(self) -> None:
        self.rows: list[tuple[int, int, dict[str, float]]] = []
        self.calls: list[str] = []

    def setup(self, run_dir, hparams):
        self.calls.append("setup")
        self.hparams = hparams

    def log_metrics(self, metrics, step, epoch):
        self.rows.append((step, epoch, metrics))

    def log_model(self, trainer):
        self.calls.append("model")

    def finalize(self, status):
        self.calls.append(status)


def test_every_logger_gets_every_row_at_the_steps_that_were_asked_for(fit):
    first, second = Rows(), Rows()
    fit(logger=[first, second], log_every_n_steps=5)
    assert first.rows == second.rows
    by_step = [step for step, _, row in first.rows if "train_loss_step" in row]
    assert by_step == [5, 10, 15, 20]
    assert [(step, epoch) for step, epoch, row in first.rows if "val_loss" in row] == [(12, 0), (24, 1)]
    assert [(step, epoch) for step, epoch, row in first.rows if "train_loss_epoch" in row] == [(12, 0), (24, 1)]
    assert first.calls == ["setup", "model", "success"]
    assert first.hparams["lr"] == 0.01
    assert first.hparams["trainer/max_epochs"] == 2


def test_a_logger_is_closed_whatever_happens(make_trainer):
    logger = Rows()

    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_trainer(logger=logger).fit(Fails(), loader())
    assert logger.calls == ["setup", "failed"]


def test_without_a_word_metrics_go_to_a_csv_file(make_trainer):
    trainer = make_trainer(logger=None, log_every_n_steps=4)
    trainer.fit(Classifier(), loader())
    header, *rows = (trainer.run_dir / "metrics.csv").read_text().splitlines()
    assert header.startswith("step,epoch,train_loss_step")
    assert [int(row.split(",")[0]) for row in rows] == [4, 8, 12, 12, 16, 20, 24, 24]


def test_without_a_word_a_run_has_a_directory_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    trainer = fp.Trainer(accelerator="cpu", max_epochs=1, enable_progress_bar=False, logger=False)
    trainer.fit(Classifier(), loader())
    (run,) = (tmp_path / "runs").iterdir()
    assert [path.name for path in run.iterdir()] == ["checkpoints"]


def test_enable_checkpointing_false_saves_nothing(fit):
    made, _ = fit(enable_checkpointing=False)
    assert not list(made.run_dir.rglob("*.ckpt"))
    with pytest.raises(fp.ConfigError, match="enable_checkpointing=False, but"):
        fit(enable_checkpointing=False, callbacks=[fp.ModelCheckpoint()])


def test_the_bar_and_the_summary_come_by_themselves_and_can_be_left_out(make_trainer, capsys):
    trainer = make_trainer(enable_progress_bar=True, enable_model_summary=True, max_epochs=1)
    trainer.fit(Classifier(), loader())
    said = capsys.readouterr().err
    assert "195 parameters" in said
    assert "epoch 1/1" in said
    make_trainer(max_epochs=1).fit(Classifier(), loader())
    assert capsys.readouterr().err == ""


# Continuing


def test_ckpt_path_last_begins_anew_where_there_is_nothing_and_continues_where_there_is(fit):
    assert fit(ckpt_path="last", max_epochs=1)[0].global_step == 12
    made, watch = fit(ckpt_path="last", max_epochs=3)
    assert (made.global_step, len(watch.losses)) == (36, 24)


def test_ckpt_path_may_be_a_path_from_anywhere(fit, tmp_path):
    made, _ = fit(max_epochs=1)
    made.save_checkpoint(tmp_path / "elsewhere" / "mine.ckpt")
    again, watch = fit(max_epochs=2, ckpt_path=tmp_path / "elsewhere" / "mine.ckpt", default_root_dir=tmp_path / "new")
    assert (again.global_step, len(watch.losses)) == (24, 12)


def test_an_assigned_ckpt_path_holds_until_another_is_given(make_trainer, tmp_path, caplog):
    first = make_trainer(max_epochs=1)
    first.fit(Classifier(), loader())
    first.save_checkpoint(tmp_path / "mine.ckpt")

    watch = Watch()
    trainer = make_trainer(max_epochs=2, callbacks=[watch])
    trainer.ckpt_path = tmp_path / "mine.ckpt"
    for calls in (1, 2):
        trainer.fit(Classifier(), loader())
        assert (len(watch.losses), trainer.ckpt_path) == (12 * calls, str(tmp_path / "mine.ckpt"))
    assert not caplog.records

    trainer.fit(Classifier(), loader(), ckpt_path="last")
    assert f"trainer.ckpt_path was set to {tmp_path / 'mine.ckpt'}" in caplog.text
    trainer.test(Classifier(), loader(), verbose=False)
    assert trainer.ckpt_path is None


def test_ckpt_path_best_is_the_best_of_the_monitor(make_trainer):
    class Scripted(Classifier):
        def on_validation_epoch_end(self):
            self.log("score", [3.0, 1.0, 2.0][min(self.current_epoch, 2)])

    saver = fp.ModelCheckpoint(monitor="score")
    trainer = make_trainer(max_epochs=3, callbacks=[saver])
    model = Scripted()
    trainer.fit(model, loader(), loader(40))
    after_three = final(model).clone()
    trainer.validate(model, loader(40), ckpt_path="best", verbose=False)
    best = final(model).clone()
    assert not torch.equal(best, after_three)

    fresh = Scripted()
    make_trainer(callbacks=[fp.ModelCheckpoint(monitor="score")]).test(
        fresh, loader(40), ckpt_path="best", verbose=False
    )
    assert torch.equal(final(fresh), best)


def test_there_is_no_best_before_there_is_one(make_trainer):
    with pytest.raises(fp.CheckpointError, match="no best checkpoint was kept"):
        make_trainer().validate(Classifier(), loader(40), ckpt_path="best")
    with pytest.raises(fp.CheckpointError, match=r'ckpt_path="last": there is no checkpoint in'):
        make_trainer().validate(Classifier(), loader(40), ckpt_path="last")


def test_after_fit_a_test_without_a_model_uses_the_best_weights(make_trainer):
    trainer = make_trainer(max_epochs=4, callbacks=[fp.ModelCheckpoint(monitor="val_loss", mode="max")])
    trainer.fit(Classifier(lr=0.05), loader(), loader(40))
    (result,) = trainer.test(dataloaders=loader(40, shuffle=False), verbose=False)
    assert result["test_loss"] == pytest.approx(trainer.checkpoint_callback.best_model_score, rel=1e-6)


def test_a_saved_checkpoint_is_on_the_disk_when_the_call_returns(fit, tmp_path):
    made, _ = fit(max_epochs=1)
    path = tmp_path / "a.ckpt"
    made.save_checkpoint(path)
    assert torch.equal(final(Classifier.load_from_checkpoint(path)), final(made.module))


# Evaluation and prediction


def test_validation_reports_the_mean_over_all_rows(make_trainer):
    model, (x, y) = Classifier().eval(), dataset(47).tensors
    (result,) = make_trainer().validate(model, loader(47), verbose=False)
    with torch.no_grad():
        assert result["val_loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)


def test_several_loaders_have_results_of_their_own(make_trainer):
    class Several(Classifier):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("rows", float(len(batch[0])), reduce_fx="sum")
            self.log("all", float(len(batch[0])), reduce_fx="sum", add_dataloader_idx=False)
            self.log("which", {"index": float(dataloader_idx)})

    results = make_trainer().validate(Several(), [loader(40), loader(20)], verbose=False)
    assert results == [
        {"rows/dataloader_idx_0": 40.0, "all": 60.0, "which.index/dataloader_idx_0": 0.0},
        {"rows/dataloader_idx_1": 20.0, "all": 60.0, "which.index/dataloader_idx_1": 1.0},
    ]


def test_several_loaders_need_a_step_that_is_told_which(make_trainer):
    with pytest.raises(fp.ConfigError, match=r"\(batch, batch_idx, dataloader_idx\)"):
        make_trainer().validate(Classifier(), [loader(40), loader(20)])


def test_results_hold_what_loggers_are_not_told(make_trainer):
    class Hidden(Classifier):
        def validation_step(self, batch, batch_idx):
            self.log("hidden", 1.0, logger=False)

    assert make_trainer().validate(Hidden(), loader(40), verbose=False) == [{"hidden": 1.0}]


def test_predictions_come_back_in_order_a_list_for_each_loader(make_trainer):
    class Predicts(Classifier):
        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return batch[1]

    labels = dataset().tensors[1]
    one = make_trainer().predict(Predicts(), loader(45, shuffle=False))
    assert torch.equal(torch.cat(one), labels[:45])
    two = make_trainer().predict(Predicts(), [loader(45, shuffle=False), loader(20, shuffle=False)])
    assert [len(found) for found in two] == [5, 2]
    assert make_trainer().predict(Predicts(), loader(40), return_predictions=False) is None


def test_every_layer_is_afterwards_in_the_mode_it_was_in(make_trainer):
    model = Classifier()
    model.net[2].eval()
    modes = {name: part.training for name, part in model.named_modules()}
    make_trainer().validate(model, loader(40), verbose=False)
    assert {name: part.training for name, part in model.named_modules()} == modes


def test_results_are_printed_unless_told_otherwise(make_trainer, capsys):
    make_trainer(enable_progress_bar=True).test(Classifier(), loader(40))
    assert "test_loss" in capsys.readouterr().err
    make_trainer(enable_progress_bar=True).test(Classifier(), loader(40), verbose=False)
    assert "test_loss" not in capsys.readouterr().err


# What it says of itself


def test_estimated_stepping_batches(make_trainer):
    seen = {}

    class Asks(Classifier):
        def configure_optimizers(self):
            seen["steps"] = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    for settings, steps in (
        ({"max_epochs": 3}, 36),
        ({"max_epochs": 3, "accumulate_grad_batches": 5}, 9),
        ({"max_epochs": 3, "max_steps": 10}, 10),
        ({"max_epochs": -1, "max_steps": 10}, 10),
    ):
        make_trainer(**settings).fit(Asks(), loader())
        assert seen["steps"] == steps


def test_callback_metrics_hold_the_newest_of_everything(fit):
    made, watch = fit(max_epochs=1, log_every_n_steps=50)
    metrics = {name: float(value) for name, value in made.callback_metrics.items()}
    assert set(metrics) == {"train_loss", "train_loss_step", "train_loss_epoch", "val_loss"}
    assert metrics["train_loss_step"] == pytest.approx(watch.losses[-1])
    assert metrics["train_loss_epoch"] == pytest.approx(sum(watch.losses) / 12)


def test_the_same_trainer_fits_a_second_model_from_the_beginning(make_trainer):
    trainer = make_trainer(max_epochs=1)
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Classifier()
        trainer.fit(model, loader())
        results.append(final(model))
        assert trainer.global_step == 12
    assert torch.equal(*results)


def test_a_directory_given_as_text_is_a_path(make_trainer, tmp_path):
    assert make_trainer(default_root_dir=str(tmp_path / "x")).run_dir == Path(tmp_path / "x")


def test_trainers_that_are_made_within_a_second_have_directories_of_their_own(make_trainer):
    assert len({make_trainer(default_root_dir=None).run_dir for _ in range(10)}) == 10


def test_what_holds_a_trainer_is_copied_and_sent_without_it(make_trainer):
    """Averaging callbacks copy modules. Processes receive them by pickle."""
    made, module = make_trainer(max_epochs=1), Classifier()
    made.fit(module, loader())
    holder = {"trainer": made, "module": module}
    copied = copy.deepcopy(holder)
    assert copied["trainer"] is made
    assert copied["module"] is not module
    assert pickle.loads(pickle.dumps(holder))["trainer"] is None


def test_lightnings_arguments_about_loading_change_nothing_and_those_about_writing_are_refused(make_trainer, tmp_path):
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Classifier(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    for weights_only in (True, False):
        trainer.fit(Classifier(), loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=weights_only)
        trainer.validate(Classifier(), loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=weights_only)
    with pytest.raises(fp.ConfigError, match=r"storage_options=.*Credentials come from the environment"):
        trainer.save_checkpoint(tmp_path / "b.ckpt", storage_options={"key": "k"})


def test_predictions_begin_without_the_metrics_of_an_earlier_call(make_trainer):
    made, seen = make_trainer(max_epochs=1), []

    class Predicts(Classifier):
        def predict_step(self, batch, batch_idx):
            seen.append(dict(self.trainer.callback_metrics))

    made.fit(Predicts(), loader())
    assert made.callback_metrics
    made.predict(dataloaders=loader(10))
    assert seen == [{}]


def test_no_thread_outlives_a_call(make_trainer):
    class Fails(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 5:
                raise ZeroDivisionError

    before = {*threading.enumerate()}
    trainer = make_trainer(logger=[fp.CSV(), fp.TensorBoard()], max_epochs=1)
    trainer.fit(Classifier(), loader(), loader(40))
    assert {*threading.enumerate()} <= before
    trainer.validate(dataloaders=loader(40), verbose=False)
    assert {*threading.enumerate()} <= before
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fails(), loader())
    assert {*threading.enumerate()} <= before


def test_results_of_an_evaluation_are_added_to_the_file_of_metrics(make_trainer):
    trainer = make_trainer(logger=None, log_every_n_steps=50)
    model = Classifier()
    trainer.fit(model, loader())
    before = (trainer.run_dir / "metrics.csv").read_text().splitlines()
    trainer.validate(model, loader(40), verbose=False)
    trainer.fit(model, loader())
    again = make_trainer(logger=None)
    again.test(model, loader(40), ckpt_path="last", verbose=False)

    rows = list(csv.DictReader((trainer.run_dir / "metrics.csv").read_text().splitlines()))
    names = ("val_loss", "test_loss", "train_loss_epoch")
    told = [(int(row["step"]), int(row["epoch"]), *(name for name in names if row[name])) for row in rows]
    trained = [(12, 0, "train_loss_epoch"), (24, 1, "train_loss_epoch")]
    assert len(before) == 3
    assert told == [*trained, (24, 2, "val_loss"), *trained, (0, 0, "test_loss")]
    assert not list(trainer.run_dir.glob("metrics-*.csv"))


def test_an_evaluation_beside_a_process_that_trains_leaves_its_record_alone(make_trainer, caplog):
    trainer = make_trainer(logger=None)
    with only_writer(trainer.run_dir):
        (found,) = trainer.validate(Classifier(), loader(40), verbose=False)
    assert found
    assert "The results are not logged: " in caplog.text
    assert not (trainer.run_dir / "metrics.csv").exists()


class Started(fp.Callback):
    def __init__(self) -> None:
        self.hooks: list[str] = []

    def setup(self, trainer, pl_module, stage):
        self.hooks.append(f"setup {stage}")

    def on_train_start(self, trainer, pl_module):
        self.hooks.append("on_train_start")


class Watched(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.watch = Started()

    def configure_callbacks(self):
        return [self.watch]


def test_callbacks_are_added_and_taken_away_between_calls(make_trainer):
    first, second, third = Started(), Started(), Started()
    trainer = make_trainer(callbacks=[first], max_epochs=1)
    trainer.callbacks.insert(0, second)
    assert trainer.callbacks[0] is second
    trainer.fit(Classifier(), loader())
    trainer.callbacks = [one for one in trainer.callbacks if one is not first] + [third]
    trainer.fit(Classifier(), loader())

    assert first.hooks == third.hooks == ["setup fit", "on_train_start"]
    assert second.hooks == 2 * first.hooks
    assert [one for one in trainer.callbacks if isinstance(one, Started)] == [second, third]
    assert trainer.checkpoint_callback is not None
    trainer.callbacks = []
    trainer.fit(Classifier(), loader())
    assert trainer.checkpoint_callback is None
    trainer.callbacks.append("nothing")
    with pytest.raises(fp.ConfigError, match="expected Callback objects, got 'nothing'"):
        trainer.fit(Classifier(), loader())


def test_callbacks_of_a_module_go_with_it_whatever_is_added(make_trainer):
    own, added, watched = Started(), Started(), Watched()
    trainer = make_trainer(callbacks=[own], max_epochs=1)
    trainer.fit(watched, loader())
    assert own.hooks == []  # the module's takes its place
    trainer.callbacks.append(added)
    trainer.fit(Classifier(), loader())
    assert own.hooks == added.hooks == watched.watch.hooks == ["setup fit", "on_train_start"]


def test_a_callback_that_a_setup_hook_adds_takes_part_and_a_later_one_is_told_of(make_trainer, caplog):
    early, late = Started(), Started()

    class Adds(Classifier):
        def setup(self, stage):
            if early not in self.trainer.callbacks:
                self.trainer.callbacks.append(early)

        def on_train_start(self):
            self.trainer.callbacks.append(late)

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Adds(), loader())
    assert early.hooks == ["setup fit", "on_train_start"]
    assert late.hooks == []
    assert "trainer.callbacks was changed in the middle of trainer.fit()" in caplog.text
