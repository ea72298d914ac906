"""The end of a call: its threads are gone, and each layer is in the mode it was in."""

from __future__ import annotations

import threading

import pytest
from models.small import Classifier, loader

import footplate as fp


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


def test_a_checkpoint_saved_after_training_leaves_no_thread(fit, tmp_path):
    before = set(threading.enumerate())
    made, _ = fit(max_epochs=1)
    made.save_checkpoint(tmp_path / "after.ckpt")
    assert set(threading.enumerate()) <= before


def test_every_layer_is_afterwards_in_the_mode_it_was_in(make_trainer):
    model = Classifier()
    model.net[2].eval()
    modes = {name: part.training for name, part in model.named_modules()}
    make_trainer().validate(model, loader(40), verbose=False)
    assert {name: part.training for name, part in model.named_modules()} == modes
