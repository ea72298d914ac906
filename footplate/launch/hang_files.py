"""The files with the stacks of ranks that hung: `hang-1.txt`, `hang-2.txt` and so on, in a run's or an attempt's folder."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from footplate.launch.hang_watch import Hang

HANGS_DIR = "FOOTPLATE_HANGS_DIR"  # the environment variable with the folder of a job's attempt
MAX_FILES = 20


class HangFiles:
    """Writes the files of a launch. Without a directory, it writes nothing.

    Args:
        directory: for the files. It is made with the first file.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._directory = None if directory is None else Path(directory)
        self._written: dict[Hang, Path] = {}

    def write(self, hang: Hang) -> Path | None:
        """Write a file, unless this hang has one. Return it; None if it can't be written, or if there are many."""
        if hang in self._written:
            return self._written[hang]
        # A full disk must not end the launch.
        with contextlib.suppress(OSError):
            file = self._new_file(hang.text)
            if file is not None:
                self._written[hang] = file
            return file
        return None

    def described(self, hang: Hang) -> str:
        """The sentence, and the file with the stacks, for a message."""
        file = self._written.get(hang)
        return (f"All stacks: {file}\n" if file else "") + f"{hang.sentence[0].upper()}{hang.sentence[1:]}."

    def _new_file(self, text: str) -> Path | None:
        if self._directory is None:
            return None
        self._directory.mkdir(parents=True, exist_ok=True)
        # Another process may read the file as soon as it has its name, so it is whole by then.
        draft = self._directory / f".hang-{os.getpid()}"
        draft.write_text(text)
        try:
            for number in range(1, MAX_FILES + 1):
                file = self._directory / f"hang-{number}.txt"
                if _named(draft, file):
                    return file
        finally:
            draft.unlink()
        return None


def _named(draft: Path, file: Path) -> bool:
    """Give a draft its name. Return False if another file has it."""
    try:
        os.link(draft, file)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        if file.exists():
            return False
        shutil.copyfile(draft, file)
    return True


def hang_files(directory: Path) -> list[Path]:
    """The files in a directory, in the order in which they were written."""
    return sorted(directory.glob("hang-*.txt"), key=lambda file: (len(file.name), file.name))
