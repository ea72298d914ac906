"""Which classes `--model`, `--data`, `--trainer.callbacks` and `--trainer.logger` take.

Footplate's own base classes, and Lightning's of the same role. Lightning is never imported for that: a class is taken
for one of Lightning's by the name and the package of its bases, and whoever names such a class has Lightning.
"""

from __future__ import annotations

from footplate import callbacks, tracking
from footplate.callbacks import Callback
from footplate.training.datamodule import DataModule
from footplate.training.module import Module
from footplate.training.table_datamodule import TableDataModule

_PACKAGES = ("lightning", "pytorch_lightning")


class _StandIn(type):
    """Classes with this metaclass have, as subclasses, those of Lightning's class whose name is in `stands_for`."""

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

LOGGERS = tuple(getattr(tracking, name) for name in tracking.__all__ if name not in ("Logger", "Status"))
"""Loaded here: a class that nobody has imported yet can't be found by its name."""

SHORT_NAMES = {
    "data": (TableDataModule.__name__,),
    "trainer.callbacks": tuple(name for name in callbacks.__all__ if name != "Callback"),
    "trainer.logger": tuple(kind.__name__ for kind in LOGGERS),
}
"""The classes that an option takes by their name alone, for messages."""
