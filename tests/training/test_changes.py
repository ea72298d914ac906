"""Callbacks that are added and taken away between two calls."""

from __future__ import annotations

import pytest
from models.small import Classifier, loader

import footplate as fp


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
    trainer.callbacks = [callback for callback in trainer.callbacks if callback is not first] + [third]
    trainer.fit(Classifier(), loader())

    assert first.hooks == third.hooks == ["setup fit", "on_train_start"]
    assert second.hooks == 2 * first.hooks
    assert [callback for callback in trainer.callbacks if isinstance(callback, Started)] == [second, third]
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
