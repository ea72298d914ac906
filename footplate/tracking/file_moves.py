"""Safe file operations for loggers: replace a file atomically, append completely or not at all, rename an older file."""

from __future__ import annotations

import itertools
import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Replace a text file atomically: a reader, or a crash, sees the old text or the new one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def append_whole(path: Path, data: bytes) -> None:
    """Append all of `data` to a file. If it raises OSError, nothing was appended."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        written = 0
        try:
            while written < len(data):
                written += file.write(data[written:])
        except OSError:
            file.truncate(size)
            raise


def move_aside(path: Path) -> Path | None:
    """Rename a file or directory to the first free of `name-1.ext`, `name-2.ext` …; return None if there is nothing."""
    if not path.exists():
        return None
    candidates = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(1))
    aside = next(candidate for candidate in candidates if not candidate.exists())
    return path.rename(aside)
