"""The contract of a logger: where a run's parameters, metrics, checkpoints and model are kept.

The trainer talks to loggers on rank 0 only, and always in this order:

    setup(run_dir, hparams)  →  log_metrics(...)*  log_checkpoint(...)*  →  log_model(...)?  →  finalize(status)

`trainer.validate()` and `trainer.test()` call `append` instead of `setup`: they add to the record of the run. Each call of
the trainer ends with `finalize`, even `predict` and a call that fails before `setup`.

No call may block the training loop or raise into it: a logger that does slow work hands it to a thread of its own,
keeps what it could not deliver, and delivers it later. Only `setup` and `append` may raise, and only for the user's
mistake.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

Status = Literal["success", "failed", "interrupted"]


class Logger:
    """Base class: every method does nothing, so that a logger overrides what it keeps."""

    name: str = "logger"

    def setup(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Begin the record of a run.

        After `load_state_dict`, continue the record from that state. After `finalize`, add to the same record.

        Args:
            run_dir: the run's own directory, which exists.
            hparams: flat or nested parameters: the module's and the data module's `hparams` and the trainer's settings.

        Raises:
            ConfigError: the logger can't work as configured.
        """

    def append(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Open the record that a directory has, to add results to it; begin one if there is none.

        Nothing that is recorded may be lost. By default this is `setup`.

        Args:
            run_dir: see `setup`.
            hparams: see `setup`.

        Raises:
            ConfigError: see `setup`.
        """
        self.setup(run_dir, hparams)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, epoch: int | None = None) -> None:
        """Record host floats for a global step. Called every `log_every_n_steps` and after each evaluation.

        A module may call it too, as it calls Lightning's loggers: without `epoch`, and without `step` for that of the last
        record.
        """

    def log_checkpoint(self, path: Path, aliases: tuple[str, ...]) -> None:
        """A complete checkpoint lies at `path`; `aliases` holds "best" and/or "last" where they now apply."""

    def log_model(self, trainer: Any) -> None:
        """Training ended well: keep the model itself, if this logger does."""

    def finalize(self, status: Status) -> None:
        """Deliver what is left, waiting a bounded time, and close the record."""

    def flush(self) -> None:
        """See that what was recorded is safe; called in a thread, before a checkpoint that counts on it is complete."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue the same record (a run id, say): plain values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The state of the run that is being continued; comes before `setup`."""
