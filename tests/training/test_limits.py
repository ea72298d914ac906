"""Limits of a call: epochs, steps, time, and batches."""

from __future__ import annotations

import copy
import time
from datetime import timedelta

import pytest
import torch
from models.small import Classifier, dataset, loader
from torch.utils.data import DataLoader, IterableDataset

import footplate as fp
from training.fits import Watch


class Endless(IterableDataset):
    """A data set without a length and without an end."""

    def __init__(self, rows: int = 10**9) -> None:
        self.rows = rows

    def __iter__(self):
        x, y = dataset().tensors
        return ((x[i % 120], y[i % 120]) for i in range(self.rows))


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
    (timer,) = (callback for callback in make_trainer(max_time=text).callbacks if isinstance(callback, fp.Timer))
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
