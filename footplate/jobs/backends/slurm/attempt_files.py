"""The files of an attempt on the shared disk, which the supervisor, the entry point and the replicas read and write.

    slurm.json     the supervisor's record: which Slurm job runs the attempt
    task.json      what to run, for the entry point and the replicas
    job.sh         the script that Slurm runs
    claim          the id of the Slurm job that runs the attempt: the first one that wrote it
    events.jsonl   the events of the attempt, one a line, written by the entry point:
                   start, began, ended, told (to end), over
    questions.jsonl, answer-ID.json
                   questions to the replicas, and their answers (`asking.py`)
    slurm.log      the output of the entry point and of srun

A Slurm job that is requeued runs several attempts. `task.json`, `job.sh` and `slurm.log` are in the folder of its first
one.

A file system such as NFS shows another machine's changes of an existing file when the file is opened again. It may show a
new file late. So a file exists before another machine adds to it, and each line opens and closes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RECORD = "slurm.json"
TASK = "task.json"
SCRIPT = "job.sh"
CLAIM = "claim"
EVENTS = "events.jsonl"
QUESTIONS = "questions.jsonl"
OUTPUT = "slurm.log"


def write(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file, completely or not at all. It is on disk when this returns."""
    # The supervisor and the entry point may write the same record at the same time.
    draft = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}.part")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


@dataclass(frozen=True)
class Record:
    """The record of an attempt.

    Attributes:
        first: the number of the first attempt that the Slurm job runs. The job's name has it.
        job: the Slurm job's id; None if it is going to be submitted.
    """

    first: int
    job: int | None = None

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """Read the record in an attempt's folder; None if there is none."""
        try:
            return cls(**json.loads((folder / RECORD).read_text()))
        except FileNotFoundError:
            return None

    def write(self, folder: Path) -> None:
        """Write the record, and create the folder and the files with lines if they are missing."""
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / EVENTS).touch()
        (folder / QUESTIONS).touch()
        write(folder / RECORD, json.dumps(asdict(self)))


def claim(folder: Path, job: int) -> bool:
    """Make a Slurm job the one that runs the attempt. Returns False if another one does.

    A supervisor that dies while it submits a job can't tell if Slurm has it, and the next one may submit it again. Then
    only the first of the two jobs runs the program.
    """
    draft = folder / f".{CLAIM}-{job}"
    draft.write_text(str(job))
    # A link is made completely or not at all, also by NFS.
    with suppress(FileExistsError):
        os.link(draft, folder / CLAIM)
    draft.unlink()
    return claimed(folder) == job


def claimed(folder: Path) -> int | None:
    """The id of the Slurm job that runs the attempt; None before one does."""
    try:
        return int((folder / CLAIM).read_text())
    except FileNotFoundError:
        return None


def answer(folder: Path, identity: str) -> Path:
    """The file of an answer."""
    return folder / f"answer-{identity}.json"


def fill(file: Path, value: Any) -> None:
    """Write a value and the end of a line into a file, unless nobody waits for it any more."""
    with suppress(FileNotFoundError), os.fdopen(os.open(file, os.O_WRONLY), "w") as opened:
        opened.write(json.dumps(value) + "\n")


def add_event(folder: Path, event: str, **values: Any) -> None:
    """Write an event."""
    add_line(folder / EVENTS, {"event": event, **values})


def add_line(file: Path, values: Mapping[str, Any]) -> None:
    """Add a line. It is on disk when this returns."""
    with file.open("ab") as opened:
        opened.write(json.dumps(values).encode() + b"\n")
        opened.flush()
        os.fsync(opened.fileno())


def is_over(folder: Path, role: str, index: int) -> bool:
    """Return True if a replica has ended, or its attempt has."""
    return any(
        event["event"] == "over" or (event["event"] == "ended" and (event["role"], event["index"]) == (role, index))
        for event in LineReader(folder / EVENTS).read()
    )


class LineReader:
    """Reads the lines of a file while they are written."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._at = 0

    def read(self) -> list[dict[str, Any]]:
        """The lines since the last call. A line without its end is read later."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._at)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        if not whole:
            return []
        self._at += len(whole) + 1
        return [json.loads(line) for line in whole.splitlines()]
