"""The hangs of a job, from the files that its launches have written.

A launch inside a job writes `hang-1.txt` and so on into the attempt's folder (`launch/hang_files.py`). For the stacks of a
running job, see `questions.py`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from footplate.core.errors import ConfigError
from footplate.jobs.home import Home
from footplate.launch.hang_files import HANGS_DIR, hang_files

MAX_CHARACTERS = 200_000
_ATTEMPT = re.compile(r"attempt-(\d+)")


@dataclass(frozen=True)
class HangRecord:
    """A hang that a launch has explained.

    Attributes:
        attempt: the attempt's number.
        file: the file with all stacks.
        text: the file's content; its first line is the sentence.
    """

    attempt: int
    file: Path
    text: str

    @property
    def sentence(self) -> str:
        """Which rank hung where, and which ranks waited for it."""
        return self.text.partition("\n")[0]


def hangs_of(home: Home, name: str) -> list[HangRecord]:
    """The hangs of a job, attempt by attempt. A job on another machine has none here."""
    return _hangs_in(home.job(name))


def hangs_of_run(job_id: str) -> list[HangRecord]:
    """The hangs of a job that a run's record names. A job that this machine doesn't have, or has deleted, has none.

    Args:
        job_id: the job's id, as a file has it. So it may be any text.
    """
    # A process of the job may not know the home, but it knows the folder of its attempt.
    attempt = Path(os.environ.get(HANGS_DIR, ""))
    if os.environ.get("FOOTPLATE_JOB_ID") == job_id and _ATTEMPT.fullmatch(attempt.name):
        return _hangs_in(attempt.parent)
    try:
        home = Home.existing_or_not()
    except ConfigError:
        return []
    name = home.name_of(job_id)
    return [] if name is None else _hangs_in(home.job(name))


def _hangs_in(folder: Path) -> list[HangRecord]:
    """The hangs of a job, given its folder."""
    numbers = sorted(int(match[1]) for path in folder.glob("attempt-*") if (match := _ATTEMPT.fullmatch(path.name)))
    return [
        HangRecord(number, file, file.read_text(errors="replace")[:MAX_CHARACTERS])
        for number in numbers
        for file in hang_files(folder / f"attempt-{number}")
    ]
