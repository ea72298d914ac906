"""`Console`: metrics as plain lines, for logs without a terminal.

    12:03:40  step 1,250  epoch 2  train_loss 0.4312  val_loss 0.5201

A line has the latest values since the last line. A thread prints it, so that a pipe that nobody reads doesn't stop
training.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, TextIO

from footplate.core.errors import ConfigError
from footplate.tracking.base import Logger, Status
from footplate.tracking.media import Media
from footplate.tracking.writer import BackgroundWriter

CLOSE_TIMEOUT_S = 5.0
MOST_ROWS = 20


class Console(Logger):
    """Print metrics as plain lines.

    Args:
        interval_s: print at most one line of metrics in this time. The last values are printed at the end. 0 prints each
            report.
        stderr: print to the standard error output instead of the standard output.

    Raises:
        ConfigError: a negative interval.

    Examples:
        >>> trainer = fp.Trainer(max_epochs=1, logger=[fp.Console(interval_s=10), fp.CSV()])
        >>> trainer.fit(model, train)
    """

    name = "console"
    logs_times = False

    def __init__(self, interval_s: float = 10.0, stderr: bool = False) -> None:
        if not interval_s >= 0:
            raise ConfigError(f"Console(interval_s={interval_s}): expected 0 or more seconds.")
        self._interval_s = interval_s
        self._stderr = stderr
        self._writer: BackgroundWriter | None = None
        self._step = 0
        self._epoch: int | None = None
        # The values since the last line.
        self._values: dict[str, float] = {}
        self._printed_s = 0.0

    def setup(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Start to print."""
        self._writer = BackgroundWriter("console", self._print)
        self._values = {}
        # The first report comes without delay.
        self._printed_s = -self._interval_s

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, epoch: int | None = None) -> None:
        """Print a line if the last line is old enough; else keep the values for the next line."""
        if self._writer is None:
            return
        self._step = self._step if step is None else step
        self._epoch = epoch
        self._values.update(metrics)
        if time.monotonic() - self._printed_s >= self._interval_s:
            self._print_values()

    def write_media(self, media: Media, step: int | None) -> None:
        """Print a text or a small table; name other values."""
        if self._writer is not None:
            step = self._step if step is None else step
            self._writer.put(f"{_now()}  step {step:,}  {media.kind} {media.key}{_shown(media)}")

    def finalize(self, status: Status) -> None:
        """Print the remaining values and the status."""
        if self._writer is not None:
            if self._values:
                self._print_values()
            self._writer.put(f"{_now()}  {status}")
            self._writer.close(CLOSE_TIMEOUT_S)
            self._writer = None

    def _print_values(self) -> None:
        assert self._writer is not None
        epoch = [] if self._epoch is None else [f"epoch {self._epoch}"]
        values = [f"{name} {value:.6g}" for name, value in self._values.items()]
        self._writer.put("  ".join([_now(), f"step {self._step:,}", *epoch, *values]))
        self._values = {}
        self._printed_s = time.monotonic()

    def _print(self, lines: list[str]) -> None:
        stream: TextIO = sys.stderr if self._stderr else sys.stdout
        stream.write("".join(f"{line}\n" for line in lines))
        stream.flush()


def _now() -> str:
    return time.strftime("%H:%M:%S")


def _shown(media: Media) -> str:
    """Return what follows the name of a value in its line."""
    if media.kind == "text":
        return f": {media.parsed()}"
    if media.kind != "table":
        return f" ({media.caption})" if media.caption else ""
    content = media.parsed()
    rows = [content["columns"], *content["data"][:MOST_ROWS]]
    more = len(content["data"]) - MOST_ROWS
    lines = ["\t".join(str(cell) for cell in row) for row in rows]
    return "\n".join([":", *lines, *([f"… and {more:,} more rows"] if more > 0 else [])])
