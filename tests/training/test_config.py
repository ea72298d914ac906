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
    assert [one.arg_name for one in described] == names, hint
    assert all(one.description for one in described), hint


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


def test_a_dry_run_sets_its_own_limits(trainer):
    made = trainer(fast_dev_run=3, max_epochs=9, limit_val_batches=0.5, num_sanity_val_steps=-1)
    assert (made.fast_dev_run, made.max_epochs, made.max_steps, made.num_sanity_val_steps) == (3, 1, 3, 0)
    assert (made.limit_train_batches, made.limit_val_batches) == (3, 3)
    assert trainer(fast_dev_run=1).fast_dev_run is True
    assert trainer().fast_dev_run is False


def test_a_value_that_is_assigned_counts_for_the_next_call(trainer):
    made = trainer(max_epochs=1)
    made.fit(Classifier(), loader())
    assert made.global_step > 3

    made.limit_train_batches, made.max_epochs = 2, 2
    made.fit(Classifier(), loader())
    assert made.global_step == 4


def test_a_value_that_is_assigned_is_checked(trainer):
    made = trainer()
    with pytest.raises(ConfigError, match=r"val_check_interval=2\.5: a float is a part of an epoch"):
        made.val_check_interval = 2.5
    assert made.val_check_interval is None


def test_an_argument_that_counts_when_the_trainer_is_made_cannot_be_assigned(trainer):
    made = trainer()
    with pytest.raises(ConfigError, match=r"trainer\.max_time = '00:01:00:00': this argument counts when a"):
        made.max_time = "00:01:00:00"


@pytest.mark.parametrize("name", NAMES)
def test_no_argument_is_assigned_in_vain(name):
    assert hasattr(fp.Trainer, name) or name == "callbacks"


def test_what_an_attribute_shows_may_differ_from_what_is_assigned(trainer):
    made = trainer()
    assert (made.num_sanity_val_steps, made.gradient_clip_algorithm) == (2, "norm")
    made.num_sanity_val_steps, made.gradient_clip_algorithm = -1, "value"
    assert (made.num_sanity_val_steps, made.gradient_clip_algorithm) == (float("inf"), "value")


def test_a_limit_that_was_not_given_reads_as_all_as_in_lightning(trainer):
    assert trainer().limit_train_batches == 1.0
    assert trainer(limit_train_batches=3).limit_train_batches == 3


@pytest.mark.slow
def test_a_value_that_is_assigned_counts_in_processes_that_the_trainer_starts(trainer):
    made = trainer(devices=2, max_epochs=9, enable_checkpointing=False)
    made.max_epochs, made.limit_train_batches = 1, 2
    made.fit(Classifier(), loader())
    assert made.global_step == 2
