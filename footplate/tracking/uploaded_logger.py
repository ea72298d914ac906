"""`UploadedLogger`: what the loggers share whose records an uploader process delivers (MLflow, W&B, Trackio).

    setup, append     each logger has its own: they start an `Attempt`
    log_…             a record for the attempt, if there is one
    finalize          the logger's last records, then the end of the attempt

The training process never waits for the tracker, but for a limited time in `finalize`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from footplate.tracking.attempt import CLOSE_TIMEOUT_S, Attempt
from footplate.tracking.base import Logger, Status
from footplate.tracking.media import Media
from footplate.tracking.parameters import with_epoch


class UploadedLogger(Logger):
    """Base class of these loggers.

    Attributes:
        _attempt: between `setup` or `append` and `finalize`; otherwise None.
        _run_dir: the directory of the last attempt.
        _resumed: the state of the run to continue, until `setup`.
        _step: the step of the last record.
    """

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._run_dir: Path | None = None
        self._resumed: dict[str, Any] | None = None
        self._step = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, epoch: int | None = None) -> None:
        """Queue metrics with the current time, and the epoch as a metric if it is given."""
        if self._attempt is not None:
            self._step = self._step if step is None else step
            self._attempt.put("metrics", step=self._step, values=with_epoch(metrics, epoch))

    def write_media(self, media: Media, step: int | None) -> None:
        """Queue an image, a histogram, a text, a figure or a table."""
        if self._attempt is not None:
            self._attempt.put_media(media, self._step if step is None else step)

    def finalize(self, status: Status) -> None:
        """Deliver the remaining records within a limited time. A warning names the file of undelivered records.

        If the same logger is set up again, it continues its run.
        """
        if self._attempt is None:
            return
        attempt, self._attempt = self._attempt, None
        self._put_last(attempt, status)
        attempt.close(CLOSE_TIMEOUT_S[status])

    def _put_last(self, attempt: Attempt, status: Status) -> None:
        """Queue the records that end an attempt. By default there are none."""

    def flush(self) -> None:
        if self._attempt is not None:
            self._attempt.flush()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the run to continue."""
        self._resumed = state
