"""State at the beginning of each trainer call, and attributes that are readable afterwards."""

from __future__ import annotations

import pytest
from models.small import Classifier, loader

import footplate as fp
from footplate.core.errors import ConfigError


class Reads(fp.Callback):
    """Records the beginning of each call."""

    def __init__(self):
        self.begun = []

    def setup(self, trainer, pl_module, stage):
        self.begun.append((str(stage), trainer.global_step, dict(trainer.callback_metrics), trainer.status))


def test_a_second_fit_begins_from_the_start_and_its_hooks_see_that(trainer):
    reads = Reads()
    made = trainer(max_epochs=1, callbacks=reads)
    made.fit(Classifier(), loader())
    made.fit(Classifier(), loader())
    assert reads.begun == [("fit", 0, {}, "running")] * 2
    assert made.global_step == 12


def test_what_training_has_reached_can_be_read_after_a_test(trainer):
    made = trainer(max_epochs=2)
    made.fit(Classifier(), loader(), loader(40))
    made.test(dataloaders=loader(20))
    assert (made.global_step, made.current_epoch) == (24, 2)
    assert (made.num_training_batches, made.num_val_batches, made.num_test_batches) == (12, [4], [2])
    assert set(made.dataloaders) == {"train", "val", "test"}


def test_a_training_can_be_saved_after_a_test(trainer, tmp_path):
    made = trainer(max_epochs=1)
    model = Classifier()
    made.fit(model, loader())
    made.test(dataloaders=loader(20))
    made.save_checkpoint(tmp_path / "after.ckpt")
    longer = trainer(max_epochs=2)
    longer.fit(Classifier(), loader(), ckpt_path=tmp_path / "after.ckpt")
    assert longer.global_step == 24


def test_saving_before_anything_was_trained_is_one_error(trainer, tmp_path):
    with pytest.raises(ConfigError, match=r"nothing to save: .* Call trainer\.fit\(model\) first"):
        trainer().save_checkpoint(tmp_path / "none.ckpt")
    assert not (tmp_path / "none.ckpt").exists()


def test_a_call_that_fails_at_its_beginning_leaves_no_step_of_the_last_one(trainer):
    made = trainer(max_epochs=1)
    made.fit(Classifier(), loader())
    with pytest.raises(ConfigError, match="has no data"):
        made.validate(Classifier())
    assert made.interrupted
    assert not hasattr(made.run, "step")


def test_should_stop_ends_one_fit_and_not_the_next(trainer):
    class Stops(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = len(seen) == 0 and batch_idx == 3

    seen: list[int] = []
    made = trainer(max_epochs=1, callbacks=Stops())
    made.fit(Classifier(), loader())
    assert made.should_stop
    seen.append(made.global_step)
    made.fit(Classifier(), loader())
    assert (seen, made.global_step) == ([4], 12)


def test_a_callback_may_change_an_argument_while_a_run_goes_on(trainer):
    class Longer(fp.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.max_epochs = 3

    made = trainer(max_epochs=2, callbacks=Longer())
    made.fit(Classifier(), loader(20))
    assert (made.current_epoch, made.max_epochs) == (3, 3)
