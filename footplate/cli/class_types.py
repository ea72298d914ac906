"""The classes that `--model`, `--data`, `--trainer.callbacks` and `--trainer.logger` accept.

They are subclasses of Footplate's base classes, and of Lightning's classes of the same role. This file doesn't import
Lightning: it recognises Lightning's classes by the names and packages of their bases.
"""

from __future__ import annotations

from footplate import callbacks, tracking
from footplate.callbacks import Callback
from footplate.reporting.callback import Report
from footplate.training.datamodule import DataModule
from footplate.training.module import Module
from footplate.training.table_datamodule import TableDataModule

_PACKAGES = ("lightning", "pytorch_lightning")


class _StandIn(type):
    """Metaclass of stand-ins. The subclasses of Lightning's class `stands_for` count as subclasses of the stand-in."""

    stands_for: str

    def __subclasscheck__(cls, subclass: type) -> bool:
        bases = getattr(subclass, "__mro__", ())
        return any(base.__name__ == cls.stands_for and base.__module__.partition(".")[0] in _PACKAGES for base in bases)


class LightningModule(metaclass=_StandIn):
    """Stands for `lightning.pytorch.LightningModule`."""

    stands_for = "LightningModule"


class LightningDataModule(metaclass=_StandIn):
    """Stands for `lightning.pytorch.LightningDataModule`."""

    stands_for = "LightningDataModule"


class LightningCallback(metaclass=_StandIn):
    """Stands for `lightning.pytorch.Callback`."""

    stands_for = "Callback"


MODELS = (Module, LightningModule)
DATA = (DataModule, LightningDataModule)
CALLBACKS = Callback | LightningCallback | list[Callback | LightningCallback] | None

# Loggers and callbacks are imported here, because jsonargparse finds only imported classes by their short names.
LOGGERS = tuple(getattr(tracking, name) for name in tracking.__all__ if name not in ("Logger", "Status"))
_CALLBACKS = (*(getattr(callbacks, name) for name in callbacks.__all__ if name != "Callback"), Report)

SHORT_NAMES = {
    "data": (TableDataModule.__name__,),
    "trainer.callbacks": tuple(callback.__name__ for callback in _CALLBACKS),
    "trainer.logger": tuple(logger.__name__ for logger in LOGGERS),
}
"""The classes that an option accepts without their module, for suggestions in errors."""
