"""Signals are recorded and handled between two steps, in training and elsewhere."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from models.small import Classifier, loader

import footplate as fp
from footplate import checkpoint
from footplate.core.signals import Signals


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


class Sends(Classifier):
    """Sends a signal to its own process at a given batch."""

    def __init__(self, number: signal.Signals, step: str, at: int) -> None:
        super().__init__()
        self.number, self.step_name, self.at, self.calls = number, step, at, 0

    def _step(self, name: str) -> None:
        if name == self.step_name:
            self.calls += 1
            if self.calls == self.at:
                send(self.number)

    def training_step(self, batch, batch_idx):
        self._step("training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self._step("validation")
        super().validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        self._step("predict")
        return self(batch[0])


ENDS = [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]


@pytest.mark.parametrize(("number", "error"), ENDS)
def test_in_training_the_step_is_finished_and_the_run_saved(number, error, make_trainer):
    trainer = make_trainer()
    with pytest.raises(error) as caught:
        trainer.fit(Sends(number, "training", 5), loader(), loader(20))
    assert trainer.global_step == 5
    assert trainer.interrupted
    newest = checkpoint.newest([trainer.checkpoint_callback.dirpath])
    assert checkpoint.read_meta(newest)["global_step"] == 5
    if error is SystemExit:
        assert caught.value.code == 143


def test_the_status_tells_how_the_last_call_ended(make_trainer):
    seen = []

    class Fails(Classifier):
        def on_train_start(self):
            seen.append((self.trainer.status, self.trainer.interrupted))

        def training_step(self, batch, batch_idx):
            raise KeyboardInterrupt  # like Python's own handler

    class Sees(fp.Callback):
        def on_exception(self, trainer, pl_module, exception):
            seen.append((trainer.status, trainer.interrupted))

    trainer = make_trainer(callbacks=[Sees()])
    assert (trainer.status, trainer.interrupted) == ("initializing", False)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Fails(), loader())
    assert seen == [("running", False), ("interrupted", True)]
    trainer.validate(Classifier(), loader())
    assert (trainer.status, trainer.interrupted) == ("finished", False)


@pytest.mark.parametrize(("number", "error"), ENDS)
def test_in_validation_the_run_ends_before_the_next_batch_and_is_saved(number, error, make_trainer):
    trainer = make_trainer(num_sanity_val_steps=0)
    model = Sends(number, "validation", 2)
    with pytest.raises(error):
        trainer.fit(model, loader(), loader(60))
    assert model.calls == 2
    newest = checkpoint.newest([trainer.checkpoint_callback.dirpath])
    assert checkpoint.read_meta(newest)["global_step"] == 12
    again = make_trainer()
    again.fit(Classifier(), loader(), loader(60), ckpt_path="last")
    assert again.global_step == 24


@pytest.mark.parametrize(("number", "error"), ENDS)
def test_a_prediction_ends_too(number, error, make_trainer, tmp_path):
    model = Sends(number, "predict", 2)
    with pytest.raises(error):
        make_trainer().predict(model, loader(60), output=tmp_path / "out")
    assert model.calls == 2
    assert not (tmp_path / "out").exists()


def test_a_second_interrupt_ends_at_once(make_trainer):
    class Impatient(Classifier):
        def training_step(self, batch, batch_idx):
            send(signal.SIGINT)
            send(signal.SIGINT)
            raise AssertionError("it went on")

    trainer = make_trainer()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Impatient(), loader())
    assert trainer.global_step == 0


def test_loggers_learn_that_the_run_was_interrupted(make_trainer):
    class Hears(fp.Logger):
        status = ""

        def finalize(self, status):
            self.status = status

    logger = Hears()
    with pytest.raises(SystemExit):
        make_trainer(logger=logger).fit(Sends(signal.SIGTERM, "training", 1), loader())
    assert logger.status == "interrupted"


def test_the_handlers_from_before_are_put_back(make_trainer):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    make_trainer(max_epochs=1).fit(Classifier(), loader())
    with pytest.raises(SystemExit):
        make_trainer(max_epochs=1).fit(Sends(signal.SIGTERM, "training", 1), loader())
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_in_another_thread_signals_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter() -> None:
        with Signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
