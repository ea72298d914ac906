"""Averaged weights: validated, saved and left in the module, while the optimizer continues with the trained weights."""

from __future__ import annotations

import signal

import pytest
import torch
from models.small import Classifier, loader
from torch import nn

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint.frozen_weights import TRAINED


class Normed(Classifier):
    """Has running statistics and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))


class Steady(Classifier):
    """A module without random draws."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.Identity()


class Replacing(Classifier):
    """Keeps the mean of its inputs, in a new tensor at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.mean = 0.5 * self.mean + 0.5 * batch[0].mean()
        return super().training_step(batch, batch_idx)


class Watch(fp.Callback):
    """Records the losses, the weights after each step, and the validated weights. It may end a validation."""

    def __init__(self, stops_in_validation: int | None = None) -> None:
        self.losses: dict[int, str] = {}
        self.trained: dict[int, dict] = {}
        self.validated: dict[int, dict] = {}
        self.stops_at = stops_in_validation

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses[trainer.progress.batches] = float(outputs).hex()
        self.trained[trainer.global_step] = copied(pl_module)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.validated[trainer.global_step] = copied(pl_module)
        if self.stops_at is not None and trainer.progress.batches >= self.stops_at:
            signal.raise_signal(signal.SIGTERM)


def copied(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(value.equal(other[name]) for name, value in one.items())


def moving_average(trained: dict[int, dict], decay: float, start: int = 0, every: int = 1, only=lambda name: True):
    """The average after the last step, computed one number at a time."""
    average: dict = {}
    for step, state in sorted(trained.items()):
        if step - 1 <= start:
            average = {name: value.clone() for name, value in state.items()}
        elif (step - 1) % every == 0:
            for name, value in state.items():
                if value.is_floating_point() and only(name):
                    average[name] = decay * average[name] + (1 - decay) * value
                else:
                    average[name] = value
    return average


def seeded(make=Classifier):
    torch.manual_seed(5)
    return make()


@pytest.mark.parametrize("make", [Classifier, Normed, Replacing])
@pytest.mark.parametrize(("start", "every"), [(0, 1), (5, 1), (4, 3)])
def test_training_ends_with_the_average_of_the_weights_that_were_trained(make, start, every, make_trainer):
    module, watch = seeded(make), Watch()
    averaging = fp.EMAWeightAveraging(0.9, update_every_n_steps=every, update_starting_at_step=start)
    make_trainer(callbacks=[watch, averaging]).fit(module, loader())
    expected = moving_average(watch.trained, 0.9, start, every)
    torch.testing.assert_close(module.state_dict(), expected)


def test_buffers_may_be_those_that_were_trained(make_trainer):
    module, watch = seeded(Normed), Watch()
    make_trainer(callbacks=[watch, fp.EMAWeightAveraging(0.9, use_buffers=False)]).fit(module, loader())
    expected = moving_average(watch.trained, 0.9, only=lambda name: "running" not in name)
    torch.testing.assert_close(module.state_dict(), expected)
    assert module.state_dict()["net.1.running_mean"].equal(watch.trained[24]["net.1.running_mean"])


def test_training_is_what_it_is_without_it_and_validation_sees_the_average(make_trainer, tmp_path):
    plain, averaged = Watch(), Watch()
    make_trainer(callbacks=plain, default_root_dir=tmp_path / "plain").fit(seeded(Normed), loader(), loader(30))
    trainer = make_trainer(callbacks=[averaged, fp.EMAWeightAveraging(0.9)])
    trainer.fit(seeded(Normed), loader(), loader(30))
    assert averaged.losses == plain.losses
    assert all(same(averaged.trained[step], plain.trained[step]) for step in plain.trained)
    assert not same(averaged.validated[12], averaged.trained[12])
    trainer.validate(trainer.module, loader(30))
    assert same(averaged.validated[24], copied(trainer.module))


def test_one_update_for_each_optimizer_step(make_trainer):
    module, watch = seeded(), Watch()
    make_trainer(callbacks=[watch, fp.EMAWeightAveraging(0.5)], accumulate_grad_batches=4).fit(module, loader())
    assert sorted(watch.trained) == [0, 1, 2, 3, 4, 5, 6]
    torch.testing.assert_close(module.state_dict(), moving_average(watch.trained, 0.5))


def test_a_checkpoint_holds_the_average_as_its_weights_and_the_trained_ones_beside_it(make_trainer):
    module, watch = seeded(), Watch()
    trainer = make_trainer(callbacks=[watch, fp.EMAWeightAveraging(0.9)])
    trainer.fit(module, loader(), loader(30))
    state = checkpoint.load(trainer.checkpoint_callback.best_model_path)
    assert same(state["state_dict"], copied(module))
    assert same(state[TRAINED], watch.trained[24])
    assert same(copied(Classifier.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)), copied(module))
    trainer.test(module, loader(30), ckpt_path="best")
    assert same(copied(module), state["state_dict"])


@pytest.mark.parametrize("cut", ["between epochs", "in validation"])
def test_a_run_that_is_continued_is_the_one_that_was_never_cut_off(cut, make_trainer, tmp_path):
    whole, first, second = Watch(), Watch(12 if cut == "in validation" else None), Watch()
    module = seeded(Normed)
    settings = {"num_sanity_val_steps": 0}
    make_trainer(callbacks=[whole, fp.EMAWeightAveraging(0.9)], default_root_dir=tmp_path / "whole", **settings).fit(
        module, loader(), loader(30)
    )
    if cut == "in validation":
        with pytest.raises(SystemExit):
            make_trainer(callbacks=[first, fp.EMAWeightAveraging(0.9)], **settings).fit(
                seeded(Normed), loader(), loader(30)
            )
    else:
        make_trainer(callbacks=[first, fp.EMAWeightAveraging(0.9)], max_epochs=1, **settings).fit(
            seeded(Normed), loader(), loader(30)
        )
    continued = seeded(Normed)
    make_trainer(callbacks=[second, fp.EMAWeightAveraging(0.9)], **settings).fit(
        continued, loader(), loader(30), ckpt_path="last"
    )
    assert {**first.losses, **second.losses} == whole.losses
    assert same(second.validated[24], whole.validated[24])
    assert same(copied(continued), copied(module))


def test_a_checkpoint_made_without_it_begins_the_average_there(make_trainer):
    make_trainer(max_epochs=1).fit(seeded(), loader())
    module, watch = Classifier(), Watch()
    make_trainer(callbacks=[watch, fp.EMAWeightAveraging(0.0)]).fit(module, loader(), ckpt_path="last")
    assert min(watch.trained) == 13
    assert same(copied(module), watch.trained[24])


def test_two_ranks_end_with_the_same_average(make_trainer, tmp_path):
    alone, shared = seeded(Steady), seeded(Steady)
    make_trainer(callbacks=fp.EMAWeightAveraging(0.9), default_root_dir=tmp_path / "one").fit(
        alone, loader(batch_size=20)
    )
    make_trainer(callbacks=fp.EMAWeightAveraging(0.9), devices=2).fit(shared, loader())
    torch.testing.assert_close(copied(shared), copied(alone))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decay": 1.0}, r"decay=1\.0\): expected 0 or more and less than 1"),
        ({"update_every_n_steps": 0}, r"update_every_n_steps=0\): expected 1 or more"),
        ({"update_starting_at_step": -1}, r"update_starting_at_step=-1\): expected 0 or more"),
    ],
)
def test_numbers_that_can_not_be_are_refused(given, message):
    with pytest.raises(fp.ConfigError, match=message):
        fp.EMAWeightAveraging(**given)


def test_a_file_of_weights_alone_holds_the_average(make_trainer, tmp_path):
    whole = fp.ModelCheckpoint(tmp_path / "whole", save_on_train_epoch_end=False)
    alone = fp.ModelCheckpoint(tmp_path / "alone", save_weights_only=True, save_on_train_epoch_end=False)
    make_trainer(max_epochs=1, callbacks=[fp.EMAWeightAveraging(0.9), whole, alone]).fit(seeded(), loader(), loader(30))
    both = checkpoint.load(whole.last_model_path), checkpoint.load(alone.last_model_path)
    assert same(both[0]["state_dict"], both[1]["state_dict"])
    assert not same(both[0][TRAINED], both[1]["state_dict"])
    assert TRAINED not in both[1]


def test_a_parameter_whose_data_is_replaced_is_still_averaged(make_trainer):
    class Moves(Classifier):
        def on_train_epoch_start(self):
            for parameter in self.parameters():
                parameter.data = parameter.data.clone()

    module, watch = seeded(Moves), Watch()
    make_trainer(callbacks=[watch, fp.EMAWeightAveraging(0.9)]).fit(module, loader())
    torch.testing.assert_close(copied(module), moving_average(watch.trained, 0.9))


def test_a_checkpoint_saved_before_training_holds_the_weights(make_trainer, tmp_path):
    class Saves(fp.Callback):
        def on_fit_start(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "first.ckpt")
            trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

    module = seeded()
    before = copied(module)
    make_trainer(callbacks=[Saves(), fp.EMAWeightAveraging(0.9)]).fit(module, loader())
    for name in ("first", "weights"):
        assert same(checkpoint.load(tmp_path / f"{name}.ckpt")["state_dict"], before)
