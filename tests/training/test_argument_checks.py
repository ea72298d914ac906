"""Numeric arguments of the trainer: meaning, and refused values."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.errors import ConfigError
from footplate.training.argument_checks import (
    as_list,
    check_count,
    check_limit,
    limit_batches,
    validation_interval,
)
from footplate.training.trainer import Trainer

totals = st.integers(1, 10_000)


@given(st.integers(0, 20_000), totals)
def test_an_int_limit_is_a_number_of_batches(limit, total):
    assert limit_batches("limit", limit, total) == min(limit, total)


@given(st.floats(0.0, 1.0), totals)
def test_a_float_limit_is_a_part_that_is_refused_rather_than_rounded_to_nothing(limit, total):
    if limit and int(total * limit) == 0:
        with pytest.raises(ConfigError, match="less than one"):
            limit_batches("limit", limit, total)
        return
    batches = limit_batches("limit", limit, total)
    assert 0 <= batches <= total
    assert total * limit - 1 < batches <= total * limit


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), totals)
def test_a_larger_part_never_leaves_fewer_batches(first, second, total):
    less, more = sorted((first, second))
    if int(total * less):
        assert limit_batches("limit", less, total) <= limit_batches("limit", more, total)


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("total", [7, math.inf])
def test_no_limit_leaves_all(limit, total):
    assert limit_batches("limit", limit, total) == total


def test_one_as_an_int_is_one_batch_and_as_a_float_all():
    assert limit_batches("limit", 1, 10) == 1
    assert limit_batches("limit", 1.0, 10) == 10


def test_a_part_of_an_unknown_number_is_refused_but_a_number_of_them_is_not():
    assert limit_batches("limit", 3, math.inf) == 3
    with pytest.raises(ConfigError, match=r"limit_train_batches=0.5.*unknown"):
        limit_batches("limit_train_batches", 0.5, math.inf)


@pytest.mark.parametrize("value", [-1, -0.1, 1.5, True, "3", [1]])
def test_limits_that_are_neither_a_number_nor_a_part_are_refused_by_name(value):
    with pytest.raises(ConfigError, match="limit_val_batches"):
        check_limit("limit_val_batches", value)


@pytest.mark.parametrize(
    ("interval", "epochs", "batches", "expected"),
    [
        (None, 1, 10, 10),
        (1.0, 1, 10, 10),
        (0.25, 1, 10, 2),
        (0.01, 1, 10, 1),
        (4, 1, 10, 4),
        (1, 1, 10, 1),
        (25, None, 10, 25),
        (None, 1, math.inf, math.inf),
        (5, 1, math.inf, 5),
    ],
)
def test_validation_interval(interval, epochs, batches, expected):
    assert validation_interval(interval, epochs, batches) == expected


@pytest.mark.parametrize(
    ("interval", "batches", "message"),
    [
        (11, 10, "an epoch has 10 batches"),
        (1.5, 10, "up to 1.0"),
        (0, 10, "expected batches"),
        (-0.5, 10, "expected batches"),
        (True, 10, "expected batches"),
        ("5", 10, 'expected "DD:HH:MM:SS"'),
        (0.5, math.inf, "unknown length"),
    ],
)
def test_validation_intervals_that_can_not_be_are_refused(interval, batches, message):
    with pytest.raises(ConfigError, match=message):
        validation_interval(interval, 1, batches)


@pytest.mark.parametrize("value", [None, 0, 1.0, True, "2"])
def test_counts_are_integers_of_at_least_the_least(value):
    with pytest.raises(ConfigError, match=r"log_every_n_steps=.*at least 1"):
        check_count("log_every_n_steps", value, 1)


def test_a_count_may_be_none_where_that_is_allowed():
    assert check_count("max_epochs", None, -1, none=True) is None


def test_one_thing_and_none_become_lists():
    assert as_list(None) == []
    assert as_list("text") == ["text"]
    assert as_list((1, 2)) == [1, 2]


def test_a_tilde_in_default_root_dir_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Trainer(default_root_dir="~/run", logger=False).run_dir == tmp_path / "run"


def test_variables_stand_for_arguments_that_are_not_given(monkeypatch, make_trainer, caplog):
    for name, text in {
        "MAX_STEPS": "7", "LOGGER": "False", "CALLBACKS": "", "DEVICES": "auto", "ACCELERATOR": "tpu", "EPOCHS": "3",
        "LIMIT_VAL_BATCHES": "0.5", "DEFAULT_ROOT_DIR": "elsewhere",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"PL_TRAINER_{name}", text)
    trainer = Trainer(accelerator="cpu", enable_progress_bar=False)
    assert (trainer.max_steps, trainer.loggers, trainer.limit_val_batches, trainer.run_dir) == (
        7,
        [],
        0.5,
        Path("elsewhere"),
    )
    assert trainer.config.max_steps == 7
    assert "PL_TRAINER_EPOCHS is ignored: Trainer has no argument epochs." in caplog.text
    assert make_trainer(max_steps=5).max_steps == 5


def test_a_variable_is_checked_as_its_argument_is(monkeypatch, make_trainer):
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "many")
    with pytest.raises(ConfigError, match="max_steps='many'"):
        make_trainer()
