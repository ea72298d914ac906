"""Objects that can't be pickled are named, with the path to them."""

from __future__ import annotations

import functools
import sqlite3
import threading

import cloudpickle
import pytest
import torch

from footplate.core.errors import LaunchError
from footplate.launch import launch
from footplate.launch.pickling import culprit

connection = sqlite3.connect(":memory:", check_same_thread=False)


def by_value(fn):
    """A function as in a script or a notebook: cloudpickle pickles the function itself, with the objects that it uses."""
    fn.__module__ = "__main__"
    return fn


class Config:
    def __init__(self, **given):
        vars(self).update(given)


def test_of_a_closure():
    lock = threading.Lock()

    def train():
        return lock

    assert culprit(train) == "train → closure `lock` (_thread.lock)"


def test_of_a_global_that_the_function_uses():
    @by_value
    def train():
        return [connection for _ in range(1)]

    assert culprit(train) == "train → global `connection` (sqlite3.Connection)"


def test_of_a_default():
    def train(lr, file=threading.Lock(), *, seed=1):  # noqa: B008
        pass

    def validate(*, file=threading.Lock()):  # noqa: B008
        pass

    assert culprit(train) == "train → default of `file` (_thread.lock)"
    assert culprit(validate) == "validate → default of `file` (_thread.lock)"


def test_of_arguments_given_by_place_or_by_name():
    assert culprit(max, (1, {"a": [connection]})) == (
        "max → argument 2 (dict) → ['a'] (list) → [0] (sqlite3.Connection)"
    )
    assert culprit(functools.partial(max, lr=connection)) == "max → argument `lr` (sqlite3.Connection)"


def test_through_objects_methods_and_modules():
    class Net(torch.nn.Module):
        def train_it(self):
            pass

    net = Net()
    net.config = Config(store=Config(db=connection))
    path = culprit(net.train_it).split(" → ")
    assert path[0] == "train_it"
    assert path[1].startswith("its object (")
    assert [step.split(" (")[0] for step in path[2:]] == ["attribute `config`", "attribute `store`", "attribute `db`"]


def test_of_an_object_that_refuses_by_itself():
    class Stubborn:
        def __reduce__(self):
            raise TypeError("never")

    assert culprit(max, (Stubborn(),)).endswith("<locals>.Stubborn)")


def test_of_things_that_refer_to_themselves():
    knot = [connection]
    knot.append(knot)
    assert culprit(max, (knot,)) == "max → argument 1 (list) → [0] (sqlite3.Connection)"


def test_of_a_function_that_calls_itself():
    @by_value
    def outer(n):
        def train(n):
            return train(n - 1), connection

        return train(n)

    assert culprit(outer) == "outer → global `connection` (sqlite3.Connection)"


def test_what_can_be_pickled_has_no_culprit():
    assert culprit(max, (1, "a")) == "max"
    cloudpickle.dumps(by_value)


def test_a_launch_says_so():
    lock = threading.Lock()

    def train():
        return lock

    with pytest.raises(
        LaunchError, match=r"because of train → closure `lock` \(_thread\.lock\).*make them where they are used\."
    ):
        launch(train, world_size=1)
