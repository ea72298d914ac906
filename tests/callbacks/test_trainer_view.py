"""The contract between callbacks and training: a trainer has every attribute of `TrainerView`."""

from __future__ import annotations

import inspect

import pytest
from models.small import Classifier, loader

import footplate as fp
from footplate.callbacks.trainer_view import TrainerView

ATTRIBUTES = sorted({*TrainerView.__annotations__, *(name for name in vars(TrainerView) if not name.startswith("_"))})


class Looks(fp.Callback):
    """Records the attributes that it can read in a hook, and calls none."""

    def __init__(self) -> None:
        self.missing: dict[str, list[str]] = {}

    def _look(self, hook: str, trainer: object) -> None:
        self.missing[hook] = [name for name in ATTRIBUTES if not hasattr(trainer, name)]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._look("on_train_batch_end", trainer)

    def on_validation_end(self, trainer, pl_module):
        self._look("on_validation_end", trainer)


def test_a_trainer_that_trains_has_every_attribute(make_trainer):
    looks = Looks()
    make_trainer(max_epochs=1, callbacks=[looks]).fit(Classifier(), loader(), loader())
    assert looks.missing == {"on_train_batch_end": [], "on_validation_end": []}


@pytest.mark.parametrize("name", [name for name in ATTRIBUTES if inspect.isfunction(vars(TrainerView).get(name))])
def test_a_method_takes_the_arguments_that_the_view_names(name, make_trainer):
    own = inspect.signature(getattr(make_trainer(max_epochs=1), name)).parameters
    wanted = list(inspect.signature(vars(TrainerView)[name]).parameters.values())[1:]
    assert [parameter.name for parameter in wanted if parameter.name not in own] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("should_stop", True), ("max_epochs", 5), ("accumulate_grad_batches", 2)],
)
def test_a_callback_may_assign(name, value, make_trainer):
    seen = []

    class Assigns(fp.Callback):
        def on_train_start(self, trainer, pl_module):
            setattr(trainer, name, value)
            seen.append(getattr(trainer, name))

    make_trainer(max_epochs=1, callbacks=[Assigns()]).fit(Classifier(), loader())
    assert seen == [value]
