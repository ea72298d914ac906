"""What an attempt keeps of itself on this machine, in `vertex.json`, for whoever takes it up after its supervisor has died.

It is written before what it says is done: before a CustomJob is asked for, before output is put into the files.
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
    """What is known of an attempt.

    Attributes:
        asked: when its creation was asked for; None while it is clear that there is no CustomJob.
        name: of its CustomJob, `projects/…/customJobs/…`; None before it is known.
        newest: the time of the youngest entry of the log that is known, in nanoseconds since 1970.
        known: the entries of the minute before.
        pending: what is being written: for each file the bytes it had, and the text that follows.
    """

    asked: float | None = None
    name: str | None = None
    newest: int = 0
    known: tuple[str, ...] = ()
    pending: dict[str, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> AttemptRecord:
        """The note of an attempt's folder, or an empty one."""
        try:
            found = json.loads((folder / FILE).read_text())
        except FileNotFoundError:
            return cls()
        return cls(**{**found, "known": tuple(found["known"])})

    def write(self, folder: Path) -> None:
        """Keep it, whole or not at all."""
        draft = folder / f"{FILE}.part"
        with draft.open("w") as file:
            json.dump(self.__dict__, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / FILE)


class RecordFile:
    """The note of an attempt's folder, which changes.

    Attributes:
        folder: the attempt's.
        note: as it is on the disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = AttemptRecord.read(folder)

    def change(self, **changes: Any) -> None:
        """Change it, on the disk first.

        Raises:
            OSError: it can't be written; then nothing has changed.
        """
        note = replace(self.record, **changes)
        note.write(self.folder)
        self.record = note
