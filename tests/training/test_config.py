"""The trainer's arguments: declared once, in `TrainerConfig`, and the same everywhere."""

from __future__ import annotations

import dataclasses
import inspect
import pickle

import arguments
import docstring_parser
import pytest
from models.small import Classifier, loader

import footplate as fp
from footplate.core.errors import ConfigError
from footplate.training.config import NAMES, TrainerConfig


def test_the_trainer_has_the_signature_of_its_config():
    of_trainer = inspect.signature(fp.Trainer).parameters
    of_config = inspect.signature(TrainerConfig).parameters
    assert list(of_trainer.values()) == list(of_config.values())


def test_every_argument_is_described():
    described = docstring_parser.parse(TrainerConfig.__doc__ or "").params
    names = [field.name for field in dataclasses.fields(TrainerConfig)]
    hint = "describe each field of TrainerConfig under Args, in the order of the fields"
    assert [parameter.arg_name for parameter in described] == names, hint
    assert all(parameter.description for parameter in described), hint


def test_the_page_has_the_table_that_the_config_makes():
    page = arguments.DOCS.read_text()
    assert page == arguments.filled(page), "run `make tables`"


def test_a_config_checks_itself():
    with pytest.raises(ConfigError, match=r"max_steps=-2: expected an integer of at least -1\."):
        TrainerConfig(max_steps=-2)
    with pytest.raises(ConfigError, match=r"limit_val_batches=1\.5"):
        dataclasses.replace(TrainerConfig(), limit_val_batches=1.5)


def test_a_config_travels_to_other_processes():
    config = TrainerConfig(max_epochs=3, callbacks=[fp.EarlyStopping("val_loss")])
    copied = pickle.loads(pickle.dumps(config))
    assert copied.max_epochs == 3
    assert copied.callbacks[0].monitor == "val_loss"


def test_a_dry_run_sets_its_own_limits(make_trainer):
    trainer = make_trainer(fast_dev_run=3, max_epochs=9, limit_val_batches=0.5, num_sanity_val_steps=-1)
    assert (trainer.fast_dev_run, trainer.max_epochs, trainer.max_steps, trainer.num_sanity_val_steps) == (3, 1, 3, 0)
    assert (trainer.limit_train_batches, trainer.limit_val_batches) == (3, 3)
    assert make_trainer(fast_dev_run=1).fast_dev_run is True
    assert make_trainer().fast_dev_run is False


def test_a_value_that_is_assigned_counts_for_the_next_call(make_trainer):
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Classifier(), loader())
    assert trainer.global_step > 3

    trainer.limit_train_batches, trainer.max_epochs = 2, 2
    trainer.fit(Classifier(), loader())
    assert trainer.global_step == 4


def test_a_value_that_is_assigned_is_checked(make_trainer):
    trainer = make_trainer()
    with pytest.raises(ConfigError, match=r"val_check_interval=2\.5: a float is a part of an epoch"):
        trainer.val_check_interval = 2.5
    assert trainer.val_check_interval is None


def test_an_argument_that_counts_when_the_trainer_is_made_cannot_be_assigned(make_trainer):
    trainer = make_trainer()
    with pytest.raises(ConfigError, match=r"trainer\.max_time = '00:01:00:00': this argument counts when a"):
        trainer.max_time = "00:01:00:00"


@pytest.mark.parametrize("name", NAMES)
def test_no_argument_is_assigned_in_vain(name):
    assert hasattr(fp.Trainer, name) or name == "callbacks"


def test_what_an_attribute_shows_may_differ_from_what_is_assigned(make_trainer):
    trainer = make_trainer()
    assert (trainer.num_sanity_val_steps, trainer.gradient_clip_algorithm) == (2, "norm")
    trainer.num_sanity_val_steps, trainer.gradient_clip_algorithm = -1, "value"
    assert (trainer.num_sanity_val_steps, trainer.gradient_clip_algorithm) == (float("inf"), "value")


def test_a_limit_that_was_not_given_reads_as_all_as_in_lightning(make_trainer):
    assert make_trainer().limit_train_batches == 1.0
    assert make_trainer(limit_train_batches=3).limit_train_batches == 3


@pytest.mark.slow
def test_a_value_that_is_assigned_counts_in_processes_that_the_trainer_starts(make_trainer):
    trainer = make_trainer(devices=2, max_epochs=9, enable_checkpointing=False)
    trainer.max_epochs, trainer.limit_train_batches = 1, 2
    trainer.fit(Classifier(), loader())
    assert trainer.global_step == 2


def test_the_older_spellings_are_understood_with_one_line_each(make_trainer, monkeypatch):
    with pytest.warns(FutureWarning, match="gpus"), pytest.raises(fp.ConfigError, match="cuda"):
        make_trainer(accelerator="auto", gpus=1)
    with pytest.warns(FutureWarning, match="tpu_cores"), pytest.raises(fp.ConfigError, match="tpu"):
        make_trainer(accelerator="auto", tpu_cores=8)
    monkeypatch.setenv("XLA_USE_BF16", "1")
    with pytest.warns(FutureWarning, match="XLA_USE_BF16"):
        assert make_trainer().precision.name == "bf16-true"
