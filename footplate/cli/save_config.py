"""Writes the resolved configuration of `footplate fit` into the run's directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.callbacks import Callback

if TYPE_CHECKING:
    from footplate.training.module import Module
    from footplate.training.trainer import Trainer


class SaveConfig(Callback):
    """Writes `config.yaml` as the run begins, over that of an earlier attempt.

    Args:
        to_yaml: the text for a run in a given directory.

    Attributes:
        path: the file, once it is written.
    """

    sees_weights = False

    def __init__(self, to_yaml: Callable[[Path], str]) -> None:
        self._to_yaml = to_yaml
        self.path: Path | None = None

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        if not trainer.fast_dev_run and trainer.world.rank == 0:
            self.path = trainer.run_dir / "config.yaml"
            self.path.write_text(self._to_yaml(trainer.run_dir))
