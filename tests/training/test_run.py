"""State at the beginning of each trainer call, and attributes that are readable afterwards."""

from __future__ import annotations

import pytest
import torch
from models.small import Classifier, loader

import footplate as fp
from footplate.core.errors import ConfigError
from training.fits import final


class Reads(fp.Callback):
    """Records the beginning of each call."""

    def __init__(self):
        self.begun = []

    def setup(self, trainer, pl_module, stage):
        self.begun.append((str(stage), trainer.global_step, dict(trainer.callback_metrics), trainer.status))


def test_a_second_fit_begins_from_the_start_and_its_hooks_see_that(make_trainer):
    reads = Reads()
    trainer = make_trainer(max_epochs=1, callbacks=reads)
    trainer.fit(Classifier(), loader())
    trainer.fit(Classifier(), loader())
    assert reads.begun == [("fit", 0, {}, "running")] * 2
    assert trainer.global_step == 12


def test_what_training_has_reached_can_be_read_after_a_test(make_trainer):
    trainer = make_trainer(max_epochs=2)
    trainer.fit(Classifier(), loader(), loader(40))
    trainer.test(dataloaders=loader(20))
    assert (trainer.global_step, trainer.current_epoch) == (24, 2)
    assert (trainer.num_training_batches, trainer.num_val_batches, trainer.num_test_batches) == (12, [4], [2])
    assert set(trainer.dataloaders) == {"train", "val", "test"}


def test_a_training_can_be_saved_after_a_test(make_trainer, tmp_path):
    trainer = make_trainer(max_epochs=1)
    model = Classifier()
    trainer.fit(model, loader())
    trainer.test(dataloaders=loader(20))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    longer = make_trainer(max_epochs=2)
    longer.fit(Classifier(), loader(), ckpt_path=tmp_path / "after.ckpt")
    assert longer.global_step == 24


def test_saving_before_anything_was_trained_is_one_error(make_trainer, tmp_path):
    with pytest.raises(ConfigError, match=r"nothing to save: .* Call trainer\.fit\(model\) first"):
        make_trainer().save_checkpoint(tmp_path / "none.ckpt")
    assert not (tmp_path / "none.ckpt").exists()


def test_a_call_that_fails_at_its_beginning_leaves_no_step_of_the_last_one(make_trainer):
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Classifier(), loader())
    with pytest.raises(ConfigError, match="has no data"):
        trainer.validate(Classifier())
    assert trainer.interrupted
    assert not hasattr(trainer.run, "step")


def test_should_stop_ends_one_fit_and_not_the_next(make_trainer):
    class Stops(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = len(seen) == 0 and batch_idx == 3

    seen: list[int] = []
    trainer = make_trainer(max_epochs=1, callbacks=Stops())
    trainer.fit(Classifier(), loader())
    assert trainer.should_stop
    seen.append(trainer.global_step)
    trainer.fit(Classifier(), loader())
    assert (seen, trainer.global_step) == ([4], 12)


def test_a_callback_may_change_an_argument_while_a_run_goes_on(make_trainer):
    class Longer(fp.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.max_epochs = 3

    trainer = make_trainer(max_epochs=2, callbacks=Longer())
    trainer.fit(Classifier(), loader(20))
    assert (trainer.current_epoch, trainer.max_epochs) == (3, 3)


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


def test_predictions_begin_without_the_metrics_of_an_earlier_call(make_trainer):
    made, seen = make_trainer(max_epochs=1), []

    class Predicts(Classifier):
        def predict_step(self, batch, batch_idx):
            seen.append(dict(self.trainer.callback_metrics))

    made.fit(Predicts(), loader())
    assert made.callback_metrics
    made.predict(dataloaders=loader(10))
    assert seen == [{}]
