"""Hyper-parameters: the arguments of `__init__`, kept in a form that a checkpoint can hold."""

from __future__ import annotations

import argparse
import enum
import pickle
from pathlib import Path

import pytest
import torch
from models.small import Classifier, loader
from torch import nn

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint.run_state import RunState
from footplate.core.hparams import AttributeDict, hparams_to_log, split_plain


class Base(fp.Module):
    def __init__(self, lr: float = 0.1, *, classes: int = 10, **extra) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_all_arguments_are_kept_under_their_names():
    module = Base(0.5, classes=3, depth=4)
    assert module.hparams == {"lr": 0.5, "classes": 3, "depth": 4}
    assert module.hparams.lr == module.hparams["lr"] == 0.5


def test_a_subclass_wins_over_its_base():
    class Child(Base):
        def __init__(self, lr: float = 7.0, width: int = 2) -> None:
            super().__init__(lr=lr * 2)

    assert Child().hparams == {"lr": 7.0, "width": 2, "classes": 10}


def test_some_are_chosen_or_left_out():
    class Chosen(fp.Module):
        def __init__(self, net: nn.Module, lr: float = 0.1, momentum: float = 0.9) -> None:
            super().__init__()
            self.save_hyperparameters("lr")

    class Ignoring(fp.Module):
        def __init__(self, net: nn.Module, lr: float = 0.1, momentum: float = 0.9) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["net", "momentum"])

    assert Chosen(nn.Linear(1, 1)).hparams == Ignoring(nn.Linear(1, 1)).hparams == {"lr": 0.1}


def test_a_misspelt_name_is_refused_with_the_nearest():
    class Misspelt(fp.Module):
        def __init__(self, learning_rate: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters("learningrate")

    with pytest.raises(fp.ConfigError, match='Did you mean "learning_rate"'):
        Misspelt()


def test_a_dict_or_a_namespace_is_kept_as_a_whole():
    class Config(fp.Module):
        def __init__(self, config) -> None:
            super().__init__()
            self.save_hyperparameters(config)

    assert Config({"lr": 1}).hparams == Config(argparse.Namespace(lr=1)).hparams == {"lr": 1}


def test_they_can_be_changed_and_what_they_were_is_remembered():
    module = Base(0.5)
    module.hparams.lr = 0.7
    assert module.hparams["lr"] == 0.7
    assert module.hparams_initial.lr == 0.5


def test_a_missing_one_is_named_with_those_there_are():
    with pytest.raises(AttributeError, match=r"'momentum'; there are: lr, classes"):
        _ = Base().hparams.momentum


def test_they_survive_pickling():
    assert pickle.loads(pickle.dumps(Base(0.5).hparams)).lr == 0.5


def test_two_modules_do_not_share_them():
    first, second = Base(1.0), Base(2.0)
    assert (first.hparams.lr, second.hparams.lr) == (1.0, 2.0)


def test_a_data_module_has_them_too():
    class Data(fp.DataModule):
        def __init__(self, rows: int) -> None:
            self.save_hyperparameters()

    assert Data(3).hparams == {"rows": 3}


class Whole(fp.Module):
    def __init__(self, conf, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters(conf)
        self.net = nn.Linear(conf["inputs"], width)


class Named(fp.Module):
    def __init__(self, conf: argparse.Namespace) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(conf.inputs, 2)


def saved(module: fp.Module, path: Path) -> Path:
    checkpoint.save(RunState(module, seed=1).state_dict(weights_only=True), path, {})
    return path


@pytest.mark.parametrize("conf", [{"inputs": 3, "lr": 0.5}, AttributeDict(inputs=3, lr=0.5)])
def test_those_that_came_in_one_argument_go_back_into_it(conf, tmp_path):
    path = saved(Whole(conf), tmp_path / "a.ckpt")
    assert Whole.load_from_checkpoint(path).hparams == {"inputs": 3, "lr": 0.5}
    assert Whole.load_from_checkpoint(path, lr=0.1).hparams == {"inputs": 3, "lr": 0.1}
    with pytest.raises(fp.ConfigError, match="takes no lrr"):
        Whole.load_from_checkpoint(path, lrr=0.1)


def test_a_namespace_is_one_again_after_loading(tmp_path):
    path = saved(Named(argparse.Namespace(inputs=3)), tmp_path / "a.ckpt")
    assert Named.load_from_checkpoint(path).hparams == {"conf": argparse.Namespace(inputs=3)}


def test_a_data_modules_are_kept_and_build_it_again(make_trainer, tmp_path):
    class Data(fp.DataModule):
        def __init__(self, rows: int = 20, seen: int = 0) -> None:
            self.save_hyperparameters()
            self.seen = seen

        def train_dataloader(self):
            return loader(self.hparams.rows)

        def state_dict(self):
            return {"seen": 5}

        def load_state_dict(self, state_dict):
            self.seen = state_dict["seen"]

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Classifier(), datamodule=Data(rows=30))
    again = Data.load_from_checkpoint(trainer.checkpoint_callback.last_model_path)
    assert (again.hparams.rows, again.seen) == (30, 5)
    assert Data.load_from_checkpoint(trainer.checkpoint_callback.last_model_path, rows=10).hparams.rows == 10


def test_those_that_no_checkpoint_can_hold_are_named():
    class Colour(enum.Enum):
        RED = "red"

    kept, dropped = split_plain(
        {
            "lr": 0.1,
            "path": Path("a") / "b",
            "colour": Colour.RED,
            "type": torch.float32,
            "net": nn.Linear(1, 1),
            "f": [print],
        }
    )
    assert kept == {"lr": 0.1, "path": "a/b", "colour": "red", "type": torch.float32}
    assert dropped == ["net", "f"]


def test_loggers_get_those_of_both_and_refuse_two_values_of_one_name():
    class Data(fp.DataModule):
        def __init__(self, lr: float, rows: torch.Tensor | None = None, **extra) -> None:
            super().__init__()
            self.save_hyperparameters()

    rows = torch.ones(2)
    assert hparams_to_log(Base(0.5, rows=rows), Data(0.5, rows)) == {"lr": 0.5, "classes": 10, "rows": rows}
    with pytest.raises(fp.ConfigError, match=r"'lr' is 0\.5 in the module and 0\.25 in the data module"):
        hparams_to_log(Base(0.5), Data(0.25))
    assert hparams_to_log(Base(0.5), None) == {"lr": 0.5, "classes": 10}
    assert hparams_to_log(Base(_class_path="a.Base"), Data(0.1, _class_path="b.Data"))["lr"] == 0.1
