"""Lightning's loggers behind our contract.

    ours                                        Lightning's
    setup(run_dir, hparams)                     log_hyperparams(hparams)
    log_metrics(metrics, step, epoch)           log_metrics({…, "epoch": epoch}, step), then save()
    log_model(trainer)                          log_graph(module)
    finalize(status)                            save(), finalize(status)

Rows travel through a thread of ours, so that a slow tracker doesn't slow training, and one that fails is tried again.
Everything else that people do with their logger (`self.logger.experiment.add_image(…)`) goes straight to it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.compat.lightning_callbacks import is_lightning
from footplate.core.errors import ConfigError
from footplate.tracking.base import Logger, Status
from footplate.tracking.parameters import plain, with_epoch
from footplate.tracking.writer import BackgroundWriter

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


def translate_loggers(loggers: list[Any]) -> list[Logger]:
    """Loggers of ours as they are, Lightning's behind our contract.

    Raises:
        ConfigError: something that is no logger, or a Lightning logger that is to upload Lightning's checkpoints.
    """
    return [logger if isinstance(logger, Logger) else _translate(logger) for logger in loggers]


def _translate(logger: Any) -> Logger:
    if not is_lightning(logger) or not hasattr(logger, "log_hyperparams"):
        raise ConfigError(f"logger: expected a footplate.Logger or one of Lightning's, got {type(logger).__name__}.")
    if getattr(logger, "_log_model", False):
        raise ConfigError(
            f"{type(logger).__name__}(log_model=…) uploads Lightning's checkpoint files, which aren't written here. "
            "Set log_model=False, or use footplate.MLflow, which keeps checkpoints and the model."
        )
    kind = type(logger)
    hook = getattr(kind, "after_save_checkpoint", None)
    if getattr(hook, "__module__", "lightning").split(".")[0] not in ("lightning", "pytorch_lightning"):
        log.warning(
            "%s.after_save_checkpoint() is not called: checkpoints are written in the background. A footplate.Logger has "
            "log_checkpoint(path, aliases), which is called once a checkpoint is complete.",
            kind.__name__,
        )
    return LightningLogger(logger)


class LightningLogger(Logger):
    """See the module's docstring.

    Attributes:
        original: the user's logger; what isn't found here is looked for there.
    """

    def __init__(self, original: Any) -> None:
        self.original = original
        self._writer: BackgroundWriter | None = None
        self._taken = 0

    @property
    def name(self) -> str:  # type: ignore[override]
        """The original's name."""
        return self.original.name

    def setup(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Begin the record. Raises ConfigError where the logger can't."""
        try:
            self.original.log_hyperparams(plain(hparams))
            self.original.save()
        except Exception as error:
            raise ConfigError(f"{type(self.original).__name__} can't begin its record: {error}") from error
        self._writer = BackgroundWriter(type(self.original).__name__, self._deliver)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, epoch: int | None = None) -> None:
        """A row, in the background while training runs; also what a module calls itself, then without `epoch`."""
        row = with_epoch(metrics, epoch)
        if self._writer is None:
            self.original.log_metrics(metrics=row, step=step)
        else:
            self._writer.put((row, step))

    def log_model(self, trainer: Trainer) -> None:
        """Log the graph, for a logger that was asked to."""
        _attempt(self.original, "log_graph", trainer.module)

    def finalize(self, status: Status) -> None:
        """Write what is left, waiting a bounded time, and close the record."""
        if self._writer is not None:
            self._writer.close(CLOSE_TIMEOUT_S)
            self._writer = None
        _attempt(self.original, "save")
        _attempt(self.original, "finalize", status)

    def _deliver(self, rows: list[tuple[dict[str, float], int | None]]) -> None:
        """All of the rows; after a failure it is given them again, and goes on with the first that was not taken."""
        for row, step in rows[self._taken :]:
            self.original.log_metrics(metrics=row, step=step)
            self._taken += 1
        self.original.save()
        self._taken = 0

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.original, name)


def _attempt(logger: Any, name: str, *args: Any) -> None:
    """Call a logger's method; a failure is said and nothing more, since it must not end a run."""
    try:
        getattr(logger, name)(*args)
    except Exception as error:
        log.warning("%s.%s() failed: %s", type(logger).__name__, name, error)
