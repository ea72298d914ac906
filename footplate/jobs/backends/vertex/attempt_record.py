"""The record of an attempt on this machine, in `vertex.json`. A supervisor that takes the attempt over reads it.

The record is written before the action that it describes: before a CustomJob is requested, before output is written.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

FILE = "vertex.json"


@dataclass(frozen=True)
class AttemptRecord:
    """The record of an attempt.

    Attributes:
        asked: when the CustomJob was requested; None while there certainly is none.
        name: the name of the CustomJob, `projects/…/customJobs/…`; None before it is known.
        newest: the time of the newest known log entry, in nanoseconds since 1970.
        known: the entries of the minute before that.
        pending: output that is being written: for each file its size before, and the text.
    """

    asked: float | None = None
    name: str | None = None
    newest: int = 0
    known: tuple[str, ...] = ()
    pending: dict[str, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> AttemptRecord:
        """Read the record in an attempt's folder; an empty one if there is none."""
        try:
            values = json.loads((folder / FILE).read_text())
        except FileNotFoundError:
            return cls()
        return cls(**{**values, "known": tuple(values["known"])})

    def write(self, folder: Path) -> None:
        """Write the record, completely or not at all."""
        draft = folder / f"{FILE}.part"
        with draft.open("w") as file:
            json.dump(self.__dict__, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / FILE)


class RecordFile:
    """The record in an attempt's folder, with its changes.

    Attributes:
        folder: the attempt's folder.
        record: the record on disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = AttemptRecord.read(folder)

    def change(self, **changes: Any) -> None:
        """Change the record, on disk first.

        Raises:
            OSError: it can't be written. Then nothing has changed.
        """
        record = replace(self.record, **changes)
        record.write(self.folder)
        self.record = record
