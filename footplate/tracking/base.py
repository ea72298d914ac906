"""The contract of a logger: it records the parameters, metrics, checkpoints and model of a run.

The trainer calls loggers on rank 0 only, and always in this order:

    setup(run_dir, hparams)  →  log_metrics(...)*  log_checkpoint(...)*  →  log_model(...)?  →  finalize(status)

`trainer.validate()` and `trainer.test()` call `append` instead of `setup`: they add to the record of the run. Each call of
the trainer ends with `finalize`, even `predict` and a call that fails before `setup`.

No method may block the training loop or raise an error into it. A logger does slow work in its own thread, keeps records
that it could not deliver, and delivers them later. Only `setup` and `append` may raise, and only for a mistake of the user.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

Status = Literal["success", "failed", "interrupted"]


class Logger:
    """Base class: every method does nothing. A logger overrides the methods for what it records."""

    name: str = "logger"

    def setup(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Start the record of a run.

        After `load_state_dict`, continue the record from that state. After `finalize`, add to the same record.

        Args:
            run_dir: the run's directory; it exists.
            hparams: flat or nested parameters: the `hparams` of the module and the data module, and the trainer's settings.

        Raises:
            ConfigError: the logger can't work with its configuration.
        """

    def append(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Open the record in a directory to add results; start one if there is none.

        Existing records must stay. The default calls `setup`.

        Args:
            run_dir: see `setup`.
            hparams: see `setup`.

        Raises:
            ConfigError: see `setup`.
        """
        self.setup(run_dir, hparams)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, epoch: int | None = None) -> None:
        """Record floats for a global step. Called every `log_every_n_steps` and after each evaluation.

        A module may call this, too, as with Lightning's loggers: without `epoch`, and without `step` to use the step of the
        last record.
        """

    def log_checkpoint(self, path: Path, aliases: tuple[str, ...]) -> None:
        """Record a complete checkpoint at `path`. `aliases` holds "best" and "last" if they now apply to it."""

    def log_model(self, trainer: Any) -> None:
        """Record the model itself after a successful training, if this logger does that."""

    def finalize(self, status: Status) -> None:
        """Deliver the remaining records within a limited time, and close the record."""

    def flush(self) -> None:
        """Write all records to disk. Called in a thread, before a checkpoint that depends on them is complete."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to continue the record, such as a run id: plain values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of the run that is resumed; called before `setup`."""
