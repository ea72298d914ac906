"""The checkpoint that a call begins with, and the checkpoints that a user saves."""

from __future__ import annotations

import pytest
import torch
from models.small import Classifier, loader

import footplate as fp
from training.fits import Watch, final


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


def test_lightnings_arguments_about_loading_change_nothing_and_those_about_writing_are_refused(make_trainer, tmp_path):
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Classifier(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    for weights_only in (True, False):
        trainer.fit(Classifier(), loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=weights_only)
        trainer.validate(Classifier(), loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=weights_only)
    with pytest.raises(fp.ConfigError, match=r"storage_options=.*Credentials come from the environment"):
        trainer.save_checkpoint(tmp_path / "b.ckpt", storage_options={"key": "k"})
