"""Mistakes: each is one clear error before any training, with the given value and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.small import Classifier, loader
from torch import nn
from torch.utils.data import DataLoader

import footplate as fp

ARGUMENTS = [
    ({"accelerator": "gpuu"}, r'"gpuu".*There are: '),
    ({"accelerator": "cdua"}, r'Did you mean "cuda"'),
    ({"devices": 500}, r"devices=500"),
    ({"devices": 0}, r"devices=0"),
    ({"precision": "bf16-mixt"}, r'Did you mean "bf16-mixed"'),
    ({"max_epochs": -2}, r"max_epochs=-2"),
    ({"max_epochs": 1.5}, r"max_epochs=1.5: expected an integer"),
    ({"max_steps": "10"}, r"max_steps='10'"),
    ({"limit_train_batches": 1.5}, r"limit_train_batches=1"),
    ({"limit_val_batches": -1}, r"limit_val_batches=-1"),
    ({"overfit_batches": 2.5}, r"overfit_batches=2"),
    ({"val_check_interval": 0}, r"val_check_interval=0"),
    ({"val_check_interval": 1.5}, r"val_check_interval=1.5: a float is a part"),
    ({"check_val_every_n_epoch": 0}, r"check_val_every_n_epoch=0"),
    ({"num_sanity_val_steps": -2}, r"num_sanity_val_steps=-2"),
    ({"log_every_n_steps": 0}, r"log_every_n_steps=0"),
    ({"accumulate_grad_batches": 0}, r"accumulate_grad_batches=0"),
    ({"gradient_clip_val": -1.0}, r"gradient_clip_val=-1.0"),
    ({"gradient_clip_val": "big"}, r"gradient_clip_val='big'"),
    ({"gradient_clip_algorithm": "mean"}, r'gradient_clip_algorithm="mean": expected "norm" or "value"'),
    ({"fast_dev_run": -1}, r"fast_dev_run=-1"),
    ({"seed": -1}, r"seed=-1"),
    ({"logger": "mlflow"}, r"logger|str"),
    ({"compile": "max-autotune"}, r"compile="),
    ({"deterministic": "yes"}, r"deterministic="),
    ({"max_epoch": 3}, r'max_epoch.*Did you mean "max_epochs"'),
]


@pytest.mark.parametrize(("argument", "message"), ARGUMENTS, ids=[str(next(iter(a.items()))) for a, _ in ARGUMENTS])
def test_an_argument_that_can_not_be_is_refused_by_name(argument, message, make_trainer):
    with pytest.raises(fp.FootplateError, match=message):
        make_trainer(**argument)


class NoStep(fp.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)


class NoOptimizer(NoStep):
    def training_step(self, batch, batch_idx):
        return self.net.weight.sum()


class Fit:
    """The arguments of fit, and the expected message."""

    def __init__(self, message: str, *args: Any, **settings: Any) -> None:
        self.message, self.args, self.settings = message, args, settings


FITS = {
    "no model": Fit("needs a model", None),
    "a class": Fit("expected a footplate.Module, got type", Classifier),
    "a function": Fit("expected a footplate.Module, got", print),
    "a plain network": Fit("training_step", nn.Linear(8, 3)),
    "no training step": Fit(r"NoStep has no training_step\(\)", NoStep(), [1]),
    "no optimizer": Fit(r"NoOptimizer has no configure_optimizers\(\)", NoOptimizer(), [1]),
    "no data": Fit(r"no training data: pass train_dataloaders", Classifier()),
    "a loader without batches": Fit("has no batches", Classifier(), []),
    "fewer rows than a batch": Fit("has no batches.*drop_last", Classifier(), loader(5, drop_last=True)),
    "no validation batches": Fit("validat.* loader has no batches", Classifier(), loader(), [[]]),
    "the second of two is empty": Fit("loader 1 has no batches", Classifier(), loader(), [loader(), []]),
    "an empty stream": Fit("gave no batch", Classifier(), iter([])),
    "what is no loader": Fit("can't be iterated", Classifier(), 3),
    "too small a part": Fit("less than one of 12", Classifier(), loader(), limit_train_batches=0.01),
    "too small a part of validation": Fit(
        "limit_val_batches=0.1: less than one of 4", Classifier(), loader(), loader(40), limit_val_batches=0.1
    ),
    "an interval longer than an epoch": Fit(
        "an epoch has 12 batches", Classifier(), loader(), loader(), val_check_interval=13
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_a_fit_that_can_not_be_is_refused_before_training(name, make_trainer):
    case = FITS[name]
    trainer = make_trainer(**case.settings)
    with pytest.raises(fp.FootplateError, match=case.message):
        trainer.fit(*case.args)
    assert trainer.global_step == 0


@pytest.mark.parametrize(("stage", "message"), [("validate", "no data"), ("test", "no data"), ("predict", "no data")])
def test_an_evaluation_without_data_or_step_is_refused(stage, message, make_trainer):
    with pytest.raises(fp.ConfigError, match=message):
        getattr(make_trainer(), stage)(Classifier())
    if stage != "predict":
        with pytest.raises(fp.ConfigError, match=f"{'validation' if stage == 'validate' else stage}_step"):
            getattr(make_trainer(), stage)(NoOptimizer(), loader())
    with pytest.raises(fp.ConfigError, match="none has been trained yet"):
        getattr(make_trainer(), stage)(dataloaders=loader())


@pytest.mark.parametrize("label", [3, 7, -1])
def test_a_label_out_of_the_range_of_the_outputs_is_named(label, make_trainer):
    def batches():
        for x, y in loader(40):
            y[0] = label
            yield x, y

    with pytest.raises(fp.DataError, match=rf"A label is {label}, .*outside the range of the model's outputs"):
        make_trainer(num_sanity_val_steps=0).fit(Classifier(), list(batches()))


def test_in_the_sanity_check_it_is_named_before_training(make_trainer):
    data = [(torch.zeros(2, 8), torch.tensor([0, 9]))]
    trainer = make_trainer()
    with pytest.raises(fp.DataError, match="A label is 9"):
        trainer.fit(Classifier(), loader(), [data])
    assert trainer.global_step == 0


def test_an_unwritable_directory_is_named_before_training(make_trainer, tmp_path):
    (tmp_path / "file").write_text("in the way")
    trainer = make_trainer(default_root_dir=tmp_path / "file" / "run")
    with pytest.raises(fp.ConfigError, match=r'default_root_dir="\S+run" can\'t be written to'):
        trainer.fit(Classifier(), loader())
    saver = fp.ModelCheckpoint(tmp_path / "file" / "checkpoints")
    with pytest.raises(fp.ConfigError, match=r"ModelCheckpoint: .* can't be written to"):
        make_trainer(callbacks=[saver]).fit(Classifier(), loader())
    assert trainer.global_step == 0


def test_a_missing_checkpoint_is_named_before_training_with_those_there_are(make_trainer):
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Classifier(), loader())
    there = trainer.checkpoint_callback.dirpath
    with pytest.raises(fp.CheckpointError, match=r"no checkpoint at .*There are: "):
        make_trainer().fit(Classifier(), loader(), ckpt_path=there / "epoch=7.ckpt")


def test_several_processes_are_said_to_be_too_many(make_trainer, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(fp.ConfigError, match="WORLD_SIZE=2"):
        make_trainer()


def test_errors_of_the_users_own_code_are_left_as_they_are(make_trainer):
    class Mine(Exception):
        pass

    class Fails(DataLoader):
        def __iter__(self):
            raise Mine

    with pytest.raises(Mine):
        make_trainer().fit(Classifier(), loader(), Fails([1]))
