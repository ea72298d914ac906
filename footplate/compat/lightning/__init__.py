"""Lightning's modules, data modules, callbacks, loggers and command line on Footplate's trainer.

A program that uses Lightning's classes imports nothing from here, with two exceptions:

    from footplate.compat.lightning import load_from_checkpoint    # a LightningModule from a Footplate checkpoint
    from footplate.compat.lightning.cli import LightningCLI        # Lightning's command line with footplate.Trainer

`adapter.py` is what Footplate's core calls, and has the tables of everything that is translated or refused.
`callbacks.py`, `loggers.py` and `tuner.py` translate one kind of object each.
"""

from typing import TYPE_CHECKING

from footplate.core.lazy_import import lazy

if TYPE_CHECKING:
    from footplate.compat.lightning.adapter import load_from_checkpoint as load_from_checkpoint

__all__ = ["load_from_checkpoint"]

__getattr__ = lazy(__name__, {"load_from_checkpoint": "footplate.compat.lightning.adapter"})
