"""Hooks: their order, and no call of a hook that is not overridden."""

from __future__ import annotations

import functools

import pytest
import torch
from models.small import Classifier, loader
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import footplate as fp
from footplate.core.hooks import overrides, step_arguments
from footplate.training.datamodule import DataModule
from footplate.training.module import Module
from footplate.training.module_hooks import ModuleHooks

RETURNS_BATCH = {"on_before_batch_transfer", "on_after_batch_transfer"}
NOT_EVENTS = {"transfer_batch_to_device", "on_validation_model_eval", "on_test_model_eval", "on_predict_model_eval"}


def recording(owner: type, base: type, who: str, events: list[str]) -> type:
    """A subclass of `owner` whose hooks all record their calls."""

    def recorder(name: str):
        def hook(self, *args, **_):
            events.append(f"{who}.{name}")
            return args[0] if name in RETURNS_BATCH else [] if name == "configure_callbacks" else None

        return hook

    names = [name for name in vars(base) if not name.startswith("_") and callable(getattr(base, name))]
    skipped = {*NOT_EVENTS, "state_dict", "load_state_dict", "order"}
    hooks = {name: recorder(name) for name in names if name not in skipped}
    return type(f"Recording{owner.__name__}", (owner,), hooks)


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def model(events):
    return recording(Classifier, ModuleHooks, "m", events)()


@pytest.fixture
def callback(events):
    return recording(fp.Callback, fp.Callback, "c", events)()


def test_fit(make_trainer, model, callback, events):
    """One epoch of two batches and one validation batch, callbacks before the module."""
    make_trainer(callbacks=[callback], max_epochs=1, num_sanity_val_steps=1, enable_checkpointing=False).fit(
        model, loader(20), loader(10)
    )

    def both(*names: str) -> list[str]:
        return [f"{who}.{name}" for name in names for who in "cm"]

    transfer = ["m.on_before_batch_transfer", "m.on_after_batch_transfer"]
    validation = [
        *both("on_validation_start", "on_validation_epoch_start"),
        *transfer,
        *both("on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"),
        "m.on_validation_model_train",
    ]
    batch = [
        *transfer,
        *both("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
        *both("on_before_optimizer_step", "on_train_batch_end"),
    ]
    assert events == [
        "m.configure_callbacks",
        "m.prepare_data",
        *both("setup"),
        "m.configure_model",
        *both("on_fit_start"),
        "c.on_sanity_check_start",
        *validation,
        "c.on_sanity_check_end",
        *both("on_train_start", "on_train_epoch_start"),
        *batch,
        *batch,
        *validation,
        *both("on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"),
    ]


class Splits(Classifier):
    """Chooses its rows in `on_fit_start`, which Lightning calls before it asks for the loaders."""

    rows = 0

    def on_fit_start(self):
        self.rows = 40

    def train_dataloader(self):
        return loader(self.rows)


def test_loaders_of_hooks_are_made_after_on_fit_start(make_trainer):
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Splits())
    assert trainer.global_step == trainer.num_training_batches == 4


def test_the_length_of_the_run_is_known_in_configure_optimizers(make_trainer):
    class Decays(Splits):
        rows = 30
        made = 0

        def train_dataloader(self):
            self.made += 1
            assert self.trainer.estimated_stepping_batches == float("inf")  # there is no loader yet
            return super().train_dataloader()

        def configure_optimizers(self):
            self.steps = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    model = Decays()
    make_trainer(max_epochs=2).fit(model)
    assert (model.steps, model.made) == (6, 1)


@pytest.mark.parametrize(("stage", "name"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_evaluation(stage, name, make_trainer, model, callback, events):
    model.predict_step = lambda batch, batch_idx: model(batch[0])
    getattr(make_trainer(callbacks=[callback]), stage)(model, loader(10))
    parts = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
    expected = [f"{who}.on_{name}_{part}" for part in parts for who in "cm"]
    expected += [f"m.on_{name}_model_train"] if stage != "predict" else []
    assert [event for event in events if f"on_{name}_" in event] == expected
    assert events[-2:] == ["c.teardown", "m.teardown"]


def test_the_data_modules_hooks_come_between_callbacks_and_module(make_trainer, model, callback, events):
    class Data(fp.DataModule):
        def train_dataloader(self):
            return loader(20)

    data = recording(Data, DataModule, "d", events)()
    for name in ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"):
        delattr(type(data), name)
    make_trainer(callbacks=[callback], max_epochs=1).fit(model, data)
    assert [event for event in events if event.endswith(".setup")] == ["c.setup", "d.setup", "m.setup"]
    assert events.index("d.prepare_data") < events.index("m.prepare_data") < events.index("c.setup")
    assert "d.on_before_batch_transfer" in events
    assert "m.on_before_batch_transfer" not in events


def test_an_exception_is_told_to_callbacks_and_everything_is_torn_down(make_trainer, callback, events):
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_trainer(callbacks=[callback]).fit(Fails(), loader())
    assert events[-2:] == ["c.on_exception", "c.teardown"]


def test_minus_one_from_on_train_batch_start_skips_the_rest_of_the_epoch(make_trainer):
    class Skips(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 5 else None

    trainer = make_trainer(max_epochs=2)
    trainer.fit(Skips(), loader())
    assert (trainer.global_step, trainer.current_epoch) == (10, 2)


def test_hooks_that_nobody_overrides_are_never_called(make_trainer, monkeypatch):
    """Every default hook is replaced by one that records its call."""
    called = []
    for base in (ModuleHooks, fp.Callback):
        for name, function in list(vars(base).items()):
            if not name.startswith("on_") or name.endswith("_model_eval"):
                continue

            def notes(self, *args, name=name):
                called.append(name)
                return args[0] if name in RETURNS_BATCH else None

            notes.__qualname__, notes.__module__ = function.__qualname__, function.__module__
            monkeypatch.setattr(base, name, notes)

    class Quiet(fp.Callback):
        """Overrides one hook only."""

        def on_train_start(self, trainer, pl_module):
            pass

    make_trainer(callbacks=[Quiet()], max_epochs=1, enable_checkpointing=False).fit(Classifier(), loader(), loader(20))
    assert called == []


def test_what_counts_as_overridden():
    class Between(Classifier):
        def on_fit_start(self):
            pass

    class Below(Between):
        pass

    model = Classifier()
    assert overrides(Below(), "on_fit_start")
    assert not overrides(model, "on_fit_start")
    assert not overrides(model, "no_such_hook")
    assert not overrides(Module(), "training_step")
    assert overrides(model, "training_step")
    model.on_fit_start = lambda: None
    assert overrides(model, "on_fit_start")


def test_a_hook_that_is_set_to_none_does_nothing():
    class Without(Classifier):
        validation_step = None

    model = Classifier()
    model.training_step = None
    assert not overrides(model, "training_step")
    assert not overrides(Without(), "validation_step")


def test_a_hook_that_wraps_the_empty_one_counts_as_overridden():
    class Wraps(Module):
        @functools.wraps(Module.on_fit_start)
        def on_fit_start(self):
            pass

    assert overrides(Wraps(), "on_fit_start")


def test_steps_take_as_many_arguments_as_they_declare():
    assert step_arguments(lambda batch: 0, "step") == 1
    assert step_arguments(lambda batch, batch_idx: 0, "step") == 2
    assert step_arguments(lambda batch, batch_idx, dataloader_idx=0: 0, "step") == 3
    assert step_arguments(lambda *args: 0, "step") == 3
    with pytest.raises(fp.ConfigError, match="takes no arguments"):
        step_arguments(lambda: 0, "step")
    with pytest.raises(fp.ConfigError, match="dataloader_iter"):
        step_arguments(lambda dataloader_iter: 0, "step")


# The rule of the loop: values are read from the device only when they are reported.


class CountsScalars(TorchDispatchMode):
    """Records the step at which a tensor's value is read, by `.item()`, `float()`, `bool()` or a comparison."""

    def __init__(self, trainer: fp.Trainer, read_at: list[int]) -> None:
        super().__init__()
        self.trainer, self.read_at = trainer, read_at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.read_at.append(self.trainer.global_step)
        return func(*args, **(kwargs or {}))


class CountsLists(TorchFunctionMode):
    """Records the same for `.tolist()`, `.numpy()` and `.cpu()`."""

    READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu)

    def __init__(self, trainer: fp.Trainer, read_at: list[int]) -> None:
        super().__init__()
        self.trainer, self.read_at = trainer, read_at

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.READS:
            self.read_at.append(self.trainer.global_step)
        return func(*args, **(kwargs or {}))


class Busy(Classifier):
    """Logs in every way."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"a": loss.detach() * 2, "b": loss.detach() + 1}, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 1.0}, {"precision": "bf16-mixed"}])
def test_a_hundred_steps_read_from_the_device_twice(settings, make_trainer):
    watchers = [fp.EarlyStopping("a", patience=99), fp.LearningRateMonitor(), fp.ModelCheckpoint(save_top_k=0)]
    trainer = make_trainer(max_epochs=1, log_every_n_steps=50, callbacks=watchers, enable_progress_bar=True, **settings)
    batches, read_at = list(loader(1100)), []
    with CountsScalars(trainer, read_at), CountsLists(trainer, read_at):
        trainer.fit(Busy(), batches)
    inside = {step for step in read_at if 0 < step < 110}
    assert inside == {50, 100}
    assert sum(step == 50 for step in read_at) <= 4


def test_accumulation_reads_no_more_often(make_trainer):
    trainer = make_trainer(max_epochs=1, log_every_n_steps=20, accumulate_grad_batches=2, enable_checkpointing=False)
    batches, read_at = list(loader(1000)), []
    with CountsScalars(trainer, read_at), CountsLists(trainer, read_at):
        trainer.fit(Busy(), batches)
    assert {step for step in read_at if 0 < step < 50} == {20, 40}


def test_a_hook_that_is_set_in_the_middle_of_fit_takes_effect_with_the_next_call_and_a_warning_says_so(
    make_trainer, caplog
):
    called = []

    class Changing(Classifier):
        def on_train_epoch_start(self):
            self.on_train_batch_end = lambda *_: called.append(self.current_epoch)

    module, fitted = Changing(), make_trainer(max_epochs=2)
    fitted.fit(module, loader())
    assert called == []
    assert "Changing.on_train_batch_end: set in the middle of trainer.fit(), which looks hooks up once." in caplog.text

    caplog.clear()
    del Changing.on_train_epoch_start
    again = make_trainer(max_epochs=1)
    again.fit(module, loader())
    assert called
    assert "in the middle of" not in caplog.text
