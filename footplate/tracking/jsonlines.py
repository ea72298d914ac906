"""`JSONLines`: the record of a run as a file with one JSON object a line, for programs and log collectors.

    {"time": 1764039600.5, "step": 50, "epoch": 0, "values": {"train_loss": 0.61}}
    {"time": 1764039601.5, "step": 50, "epoch": null, "image": "samples", "file": "media/image/samples/50.png"}

A line has either `values`, or the name of an image, histogram, text, figure or table. Images and figures are files in
`media`, beside the file of lines. The other kinds are in the line. Numbers that JSON doesn't have are the strings
"NaN", "Infinity" and "-Infinity", which `float` reads.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from footplate.tracking.file_logger import FileLogger, RowFile
from footplate.tracking.file_moves import append_whole, move_aside, replace_text
from footplate.tracking.media import EXTENSIONS, Media


class LinesFile:
    """A file of JSON lines that grows by lines."""

    def __init__(self, path: Path, rows: int) -> None:
        self.path = path
        self.rows = rows

    @classmethod
    def create(cls, path: Path) -> LinesFile:
        """Create an empty file."""
        replace_text(path, "")
        return cls(path, 0)

    @classmethod
    def open(cls, path: Path) -> LinesFile:
        """Open an existing file with all complete lines, or create one. A line that a crash cut off is dropped."""
        return cls._rewrite(path, _read(path))

    @classmethod
    def reopen(cls, path: Path, rows: int, step: int) -> LinesFile:
        """Truncate an existing file to its first `rows` lines, and drop lines at the end with a step after `step`."""
        kept = _read(path)[:rows]
        # If a flush timed out, the file had fewer lines than the checkpoint counted, and later lines follow.
        while kept and json.loads(kept[-1])["step"] > step:
            kept.pop()
        return cls._rewrite(path, kept)

    @classmethod
    def _rewrite(cls, path: Path, lines: list[str]) -> LinesFile:
        replace_text(path, "".join(lines))
        return cls(path, len(lines))

    def append(self, records: list[dict[str, Any]]) -> None:
        """Add a line for each record. If it raises OSError, nothing was added."""
        append_whole(self.path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode())
        self.rows += len(records)


class JSONLines(FileLogger):
    """Write one JSON object a line, and hyper-parameters to `metrics-hparams.json` beside it.

    Args:
        path: the file; `metrics.jsonl` in the run's directory by default.

    Examples:
        >>> trainer = fp.Trainer(max_epochs=1, logger=fp.JSONLines("metrics/flowers.jsonl"))
        >>> trainer.fit(model, train)
    """

    name = "jsonlines"
    title = "JSON lines"
    file_name = "metrics.jsonl"
    hparams_name = "metrics-hparams.json"
    row_file = LinesFile

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, epoch: int | None = None) -> None:
        """Write a line with the time, the step, the epoch and the values."""
        self._step = self._step if step is None else step
        values = {name: _json_number(float(value)) for name, value in metrics.items()}
        self.put({"time": time.time(), "step": self._step, "epoch": epoch, "values": values})

    def write_media(self, media: Media, step: int | None) -> None:
        """Write a line that holds the value, or names its file."""
        at_step = self._step if step is None else step
        row: dict[str, Any] = {"time": time.time(), "step": at_step, "epoch": None, media.kind: media.key}
        if media.caption is not None:
            row["caption"] = media.caption
        if EXTENSIONS[media.kind] == "png":
            self.put({**row, "file": f"media/{media.path(at_step)}", "data": media.data})
        else:
            self.put({**row, "data": media.parsed()})

    def move_aside(self, path: Path) -> None:
        """Rename the files of an older record."""
        super().move_aside(path)
        move_aside(path.with_name("media"))

    def write_rows(self, table: RowFile, path: Path, rows: list[dict[str, Any]]) -> None:
        """Write the files of rows, then the rows."""
        lines = []
        for row in rows:
            if "file" in row:
                file = path.parent / row["file"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(row["data"])
                row = {name: value for name, value in row.items() if name != "data"}
            lines.append(row)
        table.append(lines)


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _read(path: Path) -> list[str]:
    """Read the complete lines."""
    if not path.exists():
        return []
    return [f"{line}\n" for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
