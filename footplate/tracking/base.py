"""The contract of a logger: it records the parameters, metrics, checkpoints and model of a run.

The trainer calls loggers on rank 0 only, and always in this order:

    setup(run_dir, hparams)  →  log_metrics(...)*  log_checkpoint(...)*  →  log_model(...)?  →  finalize(status)

A module may call `log_image`, `log_histogram`, `log_text`, `log_figure` and `log_table` between `setup` and `finalize`.
They convert their value to a file (`media.py`), which a logger stores as well as its tool can (`write_media`).

`trainer.validate()` and `trainer.test()` call `append` instead of `setup`: they add to the record of the run. Each call
of the trainer ends with `finalize`, even `predict` and a call that fails before `setup`.

No method may block the training loop or raise an error into it. A logger does slow work in its own thread, keeps
records that it could not deliver, and delivers them later. A value that can't be logged is a warning. Only `setup` and
`append` may raise, and only for a mistake of the user.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from footplate.tracking.media import Media

log = logging.getLogger(__name__)

Status = Literal["success", "failed", "interrupted"]
"""How a run has ended: the argument of a logger's `finalize`."""


class Logger:
    """Base class: every method does nothing. A logger overrides the methods for what it records.

    Attributes:
        logs_times: the record takes the monitor's times, too. They differ between two runs whose metrics are the same.

    Examples:
        >>> class Lines(fp.Logger):
        ...     name = "lines"
        ...
        ...     def log_metrics(self, metrics, step, epoch):
        ...         print(step, metrics)
        >>> trainer = fp.Trainer(max_epochs=1, logger=[Lines(), fp.CSV()])
    """

    logs_times: bool = True
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

        A module may call this, too, as with Lightning's loggers: without `epoch`, and without `step` to use the step of
        the last record.
        """

    def log_image(
        self, key: str, images: Any, step: int | None = None, caption: Sequence[str] | str | None = None
    ) -> None:
        """Record an image, or a list of images.

        Args:
            key: the name.
            images: a tensor (C, H, W) or (H, W), an array (H, W, C) or (H, W), a PIL image, or a list of these. Floats are
                from 0 to 1.
            step: the global step; the step of the last record by default.
            caption: a text for each image.
        """
        captions = [caption] if isinstance(caption, str) else caption
        self._write("image", key, step, lambda media: media.images(key, images, captions))

    def log_histogram(self, key: str, values: Any, step: int | None = None) -> None:
        """Record the distribution of a tensor's or an array's values."""
        self._write("histogram", key, step, lambda media: [media.histogram(key, values)])

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        """Record a text."""
        self._write("text", key, step, lambda media: [media.text(key, text)])

    def log_figure(self, key: str, figure: Any, step: int | None = None) -> None:
        """Record a Matplotlib figure. You may close it afterwards."""
        self._write("figure", key, step, lambda media: [media.figure(key, figure)])

    def log_table(
        self, key: str, columns: Iterable[str], data: Iterable[Iterable[Any]], step: int | None = None
    ) -> None:
        """Record a table: the names of its columns, and its rows."""
        self._write("table", key, step, lambda media: [media.table(key, columns, data)])

    def write_media(self, media: Media, step: int | None) -> None:
        """Record an image, a histogram, a text, a figure or a table. Override it if the logger's tool has a place for them.

        Like `log_metrics`, it must not block.
        """

    def _write(self, kind: str, key: str, step: int | None, convert: Callable[[Any], list[Media]]) -> None:
        """Convert a value and record it. A value that can't be converted must not end training."""
        if type(self).write_media is Logger.write_media:
            return
        from footplate.tracking import media

        try:
            converted = convert(media)
        except Exception as error:
            log.warning("The %s %s is not logged: %s", kind, key, error)
            return
        for item in converted:
            self.write_media(item, step)

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
