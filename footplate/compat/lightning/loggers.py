"""Lightning's loggers behind Footplate's `Logger` contract.

    Footplate calls                             Lightning's logger gets
    setup(run_dir, hparams)                     log_hyperparams(hparams)
    log_metrics(metrics, step, epoch)           log_metrics({…, "epoch": epoch}, step), then save()
    log_model(trainer)                          log_graph(module)
    finalize(status)                            save(), finalize(status)

Rows go through a background thread, so that a slow logger doesn't slow training, and a failed write is retried.
Everything else that a program does with its logger (`self.logger.experiment.add_image(…)`) reaches the logger directly.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.compat.lightning._class_between import is_lightnings
from footplate.core.errors import ConfigError
from footplate.tracking.base import Logger, Status
from footplate.tracking.parameters import plain, with_epoch
from footplate.tracking.writer import BackgroundWriter

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


def translate_logger(logger: Any) -> Logger:
    """Wrap one of Lightning's loggers in our contract.

    Raises:
        ConfigError: an object of Lightning's that is not a logger, or a logger that uploads Lightning's checkpoints.
    """
    if not hasattr(logger, "log_hyperparams"):
        raise ConfigError(f"logger: expected a footplate.Logger or one of Lightning's, got {type(logger).__name__}.")
    if getattr(logger, "_log_model", False):
        raise ConfigError(
            f"{type(logger).__name__}(log_model=…) uploads Lightning's checkpoint files, which aren't written here. "
            "Set log_model=False, or use footplate.MLflow, which keeps checkpoints and the model."
        )

    kind = type(logger)
    owner = next((base for base in kind.__mro__ if "after_save_checkpoint" in vars(base)), None)
    if owner is not None and not is_lightnings(owner):
        log.warning(
            "%s.after_save_checkpoint() is not called: checkpoints are written in the background. Override "
            "log_checkpoint(path, aliases) of a footplate.Logger, which is called when a checkpoint is complete.",
            kind.__name__,
        )
    return LightningLogger(logger)


class LightningLogger(Logger):
    """A Lightning logger behind Footplate's contract; see the module's docstring.

    Attributes:
        original: the user's logger. Attributes that this class doesn't have are read from it.
    """

    def __init__(self, original: Any) -> None:
        self.original = original
        self._writer: BackgroundWriter | None = None
        self._delivered = 0

    @property
    def name(self) -> str:  # type: ignore[override]
        """The original's name."""
        return self.original.name

    def setup(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Begin the record. Raise ConfigError if the logger can't."""
        try:
            self.original.log_hyperparams(plain(hparams))
            self.original.save()
        except Exception as error:
            raise ConfigError(f"{type(self.original).__name__} can't begin its record: {error}") from error
        self._writer = BackgroundWriter(type(self.original).__name__, self._deliver)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, epoch: int | None = None) -> None:
        """Write a row, in the background during a run. A module may call this method too, without `epoch`."""
        row = with_epoch(metrics, epoch)
        if self._writer is None:
            self.original.log_metrics(metrics=row, step=step)
        else:
            self._writer.put((row, step))

    def log_model(self, trainer: Trainer) -> None:
        """Log the graph, for a logger that is set to."""
        _attempt(self.original, "log_graph", trainer.module)

    def finalize(self, status: Status) -> None:
        """Write the rows that are left, for a limited time, and close the record."""
        if self._writer is not None:
            self._writer.close(CLOSE_TIMEOUT_S)
            self._writer = None
        _attempt(self.original, "save")
        _attempt(self.original, "finalize", status)

    def _deliver(self, rows: list[tuple[dict[str, float], int | None]]) -> None:
        """Write rows. After a failure, the retry gets the same rows and continues with the first that wasn't written."""
        for row, step in rows[self._delivered :]:
            self.original.log_metrics(metrics=row, step=step)
            self._delivered += 1
        self.original.save()
        self._delivered = 0

    def __getattr__(self, name: str) -> Any:
        # Unpickling looks attributes up before `original` is set.
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)


def _attempt(logger: Any, name: str, *args: Any) -> None:
    """Call a logger's method. A failure is only a warning, because it must not end a run."""
    try:
        getattr(logger, name)(*args)
    except Exception as error:
        log.warning("%s.%s() failed: %s", type(logger).__name__, name, error)
