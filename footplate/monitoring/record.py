"""`monitor.jsonl` in a run's directory: where its time went, over all of its attempts.

Each line is a JSON object. Its "kind" is one of these:

    start     training began, or went on: time, epoch, step, world_size, device, precision, setup_s, process_s, attempt,
              total_steps
    window    some batches: time (of their end), epoch, step, batches, wall_s, seconds by cause, samples, tokens, flops, …
    epoch     the same over an epoch, and own_s of each rank if they were compared
    advice    at the end of a training: rule, text, gain, evidence
    end       training ended: step, status, peak_flops_per_s

Lines are only ever added. Unlike a row of metrics.csv, a line stays when a run goes on from an earlier checkpoint: its time
was spent. The seconds of a window are exclusive, and sum to its `wall_s`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from footplate.core.goodput.monitor_file import NAME

log = logging.getLogger(__name__)


class MonitorFile:
    """Adds lines to the file. An error of the disk is a warning, once.

    Args:
        directory: the run's directory; None to write nothing.

    Attributes:
        path: the file; None if nothing is written.
    """

    def __init__(self, directory: Path | None) -> None:
        self.path = None if directory is None else directory / NAME

    def add(self, kind: str, **values: Any) -> None:
        """Add a line, with the present time."""
        if self.path is None:
            return
        try:
            self._append(self.path, json.dumps({"kind": kind, "time": time.time(), **values}))
        except OSError as error:
            log.warning("The times of this run are no longer written down: %s", error)
            self.path = None

    @staticmethod
    def _append(path: Path, line: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            # A killed attempt may have left the beginning of a line.
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                line = "\n" + line
            file.write(line.encode() + b"\n")
