"""Writes the resolved configuration of `footplate fit` into the run's directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from footplate.callbacks import Callback

if TYPE_CHECKING:
    from footplate.module import Module
    from footplate.trainer import Trainer


class SaveConfig(Callback):
    """Writes `config.yaml` as the run begins, over that of an earlier attempt.

    Args:
        text: the configuration as YAML.

    Attributes:
        path: the file, once it is written.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.path: Path | None = None

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        if not trainer.fast_dev_run and trainer.world.rank == 0:
            self.path = Path(trainer.run_dir) / "config.yaml"
            self.path.write_text(self._text)
