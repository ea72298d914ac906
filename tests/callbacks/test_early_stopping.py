"""`EarlyStopping`: each reason to stop or to continue."""

from __future__ import annotations

import math

import pytest
from models.small import Classifier, loader

import footplate as fp


class Scripted(Classifier):
    """Its `score` in each validation is the next of a list."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores, self.checks = scores, 0

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log("score", self.scores[self.checks])
            self.checks += 1


@pytest.fixture
def stopped_after(make_trainer):
    """Number of validations that a script of scores gets under the given settings."""

    def run(scores: list[float], trainer_settings: dict | None = None, **settings) -> tuple[int, fp.EarlyStopping]:
        callback = fp.EarlyStopping("score", **settings)
        module = Scripted(scores)
        trainer = make_trainer(max_epochs=len(scores), callbacks=[callback], **(trainer_settings or {}))
        trainer.fit(module, loader(20), loader(20))
        return module.checks, callback

    return run


@pytest.mark.parametrize(
    ("scores", "settings", "checks"),
    [
        ([5, 4, 3, 2, 1], {}, 5),
        ([1, 2, 2, 2, 2, 2], {"patience": 3}, 4),
        ([1, 2, 0, 2, 2, 2], {"patience": 2}, 5),
        ([1, 1, 1], {"patience": 1}, 2),
        ([3, 4, 4], {"patience": 0}, 2),
        ([3, 2, 1], {"patience": 0}, 3),
        ([1, 2, 3, 2, 2, 2], {"patience": 2, "mode": "max"}, 5),
        ([5, 4.5, 4.1, 3.0, 2.9], {"min_delta": 1.0, "patience": 2}, 3),
        ([5, 3.9, 2.8], {"min_delta": 1.0, "patience": 1}, 3),
        ([5, 4, 3], {"min_delta": 1.0, "patience": 1}, 2),
        ([5, 4, 0.4, 0.3], {"stopping_threshold": 0.5}, 3),
        ([5, 0.5, 0.4], {"stopping_threshold": 0.5}, 3),
        ([0.1, 0.7, 0.9], {"stopping_threshold": 0.6, "mode": "max"}, 2),
        ([5, 11, 1], {"divergence_threshold": 10}, 2),
        ([5, 1, 6], {"divergence_threshold": 2, "mode": "max"}, 2),
        ([5, math.nan, 3], {}, 2),
        ([5, math.inf, 3], {}, 2),
        ([5, math.nan, 3], {"check_finite": False}, 3),
    ],
)
def test_when_it_stops(scores, settings, checks, stopped_after):
    assert stopped_after(scores, **settings)[0] == checks


@pytest.mark.parametrize(
    ("scores", "settings", "reason"),
    [
        ([1, 2, 2], {"patience": 2}, "score has not improved for 2 checks (best: 1)"),
        ([1, 0.2], {"stopping_threshold": 0.5}, "score = 0.2 reached the threshold of 0.5"),
        ([1, 20], {"divergence_threshold": 10}, "score = 20 is beyond the divergence threshold of 10"),
        ([1, math.nan], {}, "score is nan at step 4"),
    ],
)
def test_it_says_why(scores, settings, reason, stopped_after):
    callback = stopped_after(scores, **settings)[1]
    assert callback.stopping_reason == reason
    assert callback.stopped_epoch == len(scores) - 1


@pytest.mark.parametrize("interval", [1, 0.5])
def test_it_checks_after_each_validation_inside_an_epoch(interval, stopped_after):
    checks, _ = stopped_after([1.0] * 20, {"val_check_interval": interval}, patience=1)
    assert checks == 2


@pytest.mark.parametrize("rhythm", [{}, {"val_check_interval": 0.5}, {"check_val_every_n_epoch": 2}])
def test_it_may_watch_training_alone(rhythm, make_trainer):
    callback = fp.EarlyStopping("train_loss", patience=1, min_delta=100.0)
    trainer = make_trainer(max_epochs=50, callbacks=[callback], **rhythm)
    trainer.fit(Classifier(), loader())
    assert trainer.current_epoch == 2


def test_it_sees_what_the_module_logs_at_the_end_of_the_epoch(make_trainer):
    class Logs(Classifier):
        def on_train_epoch_end(self) -> None:
            self.log("f1", 1.0 - self.current_epoch / 10)

    trainer = make_trainer(max_epochs=9, callbacks=[fp.EarlyStopping("f1", mode="max", patience=2)])
    trainer.fit(Logs(), loader())
    assert trainer.current_epoch == 3


def test_min_epochs_and_min_steps_are_waited_for(make_trainer):
    for settings, steps in (({"min_epochs": 4}, 48), ({"min_steps": 30}, 30)):
        trainer = make_trainer(
            max_epochs=9, callbacks=[fp.EarlyStopping("val_loss", patience=1, min_delta=100.0)], **settings
        )
        trainer.fit(Classifier(), loader(), loader(20))
        assert trainer.global_step == steps


def test_patience_goes_on_after_a_resume(make_trainer):
    def run(epochs: int) -> fp.Trainer:
        trainer = make_trainer(max_epochs=epochs, callbacks=[fp.EarlyStopping("val_loss", patience=3, min_delta=100.0)])
        trainer.fit(Classifier(), loader(), loader(20), ckpt_path="last")
        return trainer

    assert run(3).current_epoch == 3
    assert run(9).current_epoch == 4
    assert run(9).current_epoch == 4


def test_a_second_fit_begins_with_all_its_patience(make_trainer):
    trainer = make_trainer(max_epochs=3, callbacks=[fp.EarlyStopping("val_loss", patience=1, min_delta=100.0)])
    for _ in range(2):
        trainer.fit(Classifier(), loader(), loader(20))
        assert trainer.global_step == 24


def test_a_misspelt_monitor_is_named_after_the_first_batch_with_the_nearest(make_trainer):
    trainer = make_trainer(callbacks=[fp.EarlyStopping("vall_loss")])
    with pytest.raises(fp.ConfigError, match=r'EarlyStopping monitors "vall_loss".*Did you mean "val_loss"'):
        trainer.fit(Classifier(), loader(), loader(20))
    assert trainer.global_step == 1


def test_a_missing_monitor_may_be_allowed(make_trainer):
    class Quiet(Classifier):
        def on_train_epoch_end(self) -> None:
            """Might log, so the monitor isn't known to be wrong."""

    with pytest.raises(fp.ConfigError, match=r'"nothing".*nothing of that name has been logged'):
        make_trainer(callbacks=[fp.EarlyStopping("nothing")]).fit(Quiet(), loader(), loader(20))
    trainer = make_trainer(callbacks=[fp.EarlyStopping("nothing", strict=False)])
    trainer.fit(Quiet(), loader(), loader(20))
    assert trainer.current_epoch == 2


class Explodes(Classifier):
    """Its loss is NaN at some batch."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if self.trainer.progress.batches + 1 == self.batch else loss


@pytest.mark.parametrize(
    ("batch", "settings", "step"),
    [
        (7, {}, 7),
        (1, {}, 1),
        (20, {"log_every_n_steps": 1}, 20),
        (20, {"log_every_n_steps": 9}, 20),
        (8, {"accumulate_grad_batches": 4}, 2),
        (11, {"accumulate_grad_batches": 5}, 3),
        (10, {"accumulate_grad_batches": 5}, 2),
    ],
)
def test_a_nan_loss_stops_training_and_is_named_at_its_first_step(batch, settings, step, make_trainer):
    callback = fp.EarlyStopping("train_loss")
    trainer = make_trainer(max_epochs=9, callbacks=[callback], **settings)
    trainer.fit(Explodes(batch), loader())
    assert trainer.not_finite == ("the training loss", step)
    assert f"first at step {step}" in callback.stopping_reason
    assert trainer.current_epoch <= 3
