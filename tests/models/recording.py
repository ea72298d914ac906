"""Record everything visible of a LightningModule's training under Lightning's trainer or ours.

`train(case, engine)` runs a `Case` and returns a `Record`: the hooks in the order of their calls, each with the epoch and
step that it sees; the values that loggers receive; the learning rates; and the final weights. A test compares two records
of one case, one of each engine, field by field.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger as LightningLogger

import footplate as fp

MODULE_HOOKS = (
    "prepare_data", "setup", "teardown", "configure_model", "configure_callbacks", "on_fit_start", "on_fit_end",
    "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start",
    "on_train_batch_end", "on_validation_start", "on_validation_end", "on_validation_epoch_start",
    "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end", "on_test_start", "on_test_end",
    "on_test_epoch_start", "on_test_epoch_end", "on_test_batch_start", "on_test_batch_end", "on_predict_start",
    "on_predict_end", "on_predict_epoch_start", "on_predict_epoch_end", "on_predict_batch_start",
    "on_predict_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_save_checkpoint", "on_load_checkpoint", "on_validation_model_eval",
    "on_validation_model_train", "on_test_model_eval", "on_test_model_train", "on_predict_model_eval",
    "on_before_batch_transfer", "on_after_batch_transfer", "configure_optimizers", "train_dataloader",
    "val_dataloader", "test_dataloader", "predict_dataloader",
)  # fmt: skip
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
CALLBACK_HOOKS = (
    *(name for name in MODULE_HOOKS if name.startswith("on_") and name in vars(pl.Callback)),
    "setup", "teardown", "on_sanity_check_start", "on_sanity_check_end", "on_exception",
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    """One call of a hook, with the epoch and step that the module sees."""

    who: str
    name: str
    epoch: int
    step: int
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Row:
    """The values of one call to a logger."""

    metrics: tuple[tuple[str, float], ...]
    epoch: int | None


@dataclass(frozen=True)
class Case:
    """A module, its batches and the trainer's arguments, the same for both engines."""

    name: str
    module: Callable[[], pl.LightningModule]
    trainer: dict[str, Any] = field(default_factory=dict)
    loaders: Callable[[], tuple[Any, Any]] = lambda: (None, None)
    callbacks: Callable[[], list[Any]] = list


@dataclass
class Record:
    """Everything visible of one run."""

    events: list[Event] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    rates: list[tuple[float, ...]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    callback_metrics: dict[str, float] = field(default_factory=dict)
    hooks: set[str] = field(default_factory=set)
    epoch: int = -1
    step: int = -1


def train(case: Case, engine: str, directory: Path) -> Record:
    """Run `fit` under an engine ("lightning" or "footplate")."""
    record = Record()
    torch.manual_seed(0)
    module = watched(case.module(), record)
    trainer = trainer_of(engine, record, directory, callbacks=case.callbacks(), **{"max_epochs": 2, **case.trainer})
    train_loader, val_loader = case.loaders()
    with quiet():
        trainer.fit(module, train_loader, val_loader)
    record.weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    record.callback_metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    record.epoch, record.step = trainer.current_epoch, trainer.global_step
    return record


def evaluate(case: Case, engine: str, stage: str, directory: Path) -> tuple[Record, Any]:
    """Run "validate", "test" or "predict" over the validation loaders under an engine. Return the record and the result."""
    record = Record()
    torch.manual_seed(0)
    module = watched(case.module(), record)
    trainer = trainer_of(engine, record, directory, max_epochs=1, **case.trainer)
    with quiet():
        results = getattr(trainer, stage)(
            module, case.loaders()[1], **({} if stage == "predict" else {"verbose": False})
        )
    return record, results


def trainer_of(engine: str, record: Record, directory: Path, **arguments: Any) -> Any:
    """A trainer of an engine on the CPU that logs every step into `record` and saves no checkpoints."""
    arguments = {
        "accelerator": "cpu", "devices": 1, "log_every_n_steps": 1, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(directory), **arguments,
    }  # fmt: skip
    callbacks = [Watcher(record), *arguments.pop("callbacks", [])]
    if engine == "lightning":
        with quiet():
            return pl.Trainer(logger=LightningRows(record), callbacks=callbacks, **arguments)
    return fp.Trainer(logger=Rows(record), callbacks=callbacks, **arguments)


def watched(module: pl.LightningModule, record: Record) -> pl.LightningModule:
    """The module, in a subclass that records each call of a hook or step and then calls the original."""
    kind = type(module)
    names = [name for name in (*MODULE_HOOKS, *STEPS) if hasattr(kind, name)]
    module.__class__ = type(kind.__name__, (kind,), {
        "__module__": kind.__module__, **{name: _noting(kind, name, record) for name in names if _worth(kind, name)}
    })  # fmt: skip
    return module


def _worth(kind: type, name: str) -> bool:
    """Return True if a method should be recorded.

    A hook may always be recorded. A step or loader may be recorded only if the module has it: otherwise the subclass would
    seem to define it.
    """
    return name.startswith("on_") or getattr(kind, name) is not getattr(pl.LightningModule, name, None)


def _noting(kind: type, name: str, record: Record) -> Callable[..., Any]:
    inherited = getattr(kind, name)

    def noted(self: pl.LightningModule, *args: Any, **kwargs: Any) -> Any:
        record.events.append(_event("module", name, self, (*args, *kwargs.values())))
        return inherited(self, *args, **kwargs)

    if name in STEPS:
        noted.__signature__ = inspect.signature(inherited)  # type: ignore[attr-defined]
    return noted


def _event(who: str, name: str, module: Any, args: tuple[Any, ...]) -> Event:
    numbers = tuple(getattr(arg, "value", arg) for arg in args if isinstance(arg, (int, str)))
    return Event(who, name, module.current_epoch, module.global_step, numbers)


class Watcher(pl.Callback):
    """Records each call of a callback hook, and the learning rates of every step."""

    def __init__(self, record: Record) -> None:
        self.record = record


def _watching(name: str) -> Callable[..., None]:
    def watch(self: Watcher, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        self.record.events.append(_event("callback", name, pl_module, (*args, *kwargs.values())))
        if name == "on_train_batch_start":
            rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
            self.record.rates.append(tuple(map(float, rates)))

    return watch


for _name in CALLBACK_HOOKS:
    setattr(Watcher, _name, _watching(_name))


class LightningRows(LightningLogger):
    """A Lightning logger that records its input."""

    name, version = "rows", 0

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        epoch = values.pop("epoch", None)  # rows of single evaluation batches have none
        if values:
            self.record.rows.append(Row(tuple(sorted(values.items())), None if epoch is None else int(epoch)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Ignore hyperparameters."""


class Rows(fp.Logger):
    """A Footplate logger that records its input."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def log_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        self.record.rows.append(Row(tuple(sorted(metrics.items())), epoch))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A context without Lightning's tips and warnings."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "footplate")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
