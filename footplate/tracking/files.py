"""Small moves with files that every logger makes: append to one or replace it whole, move an older one aside."""

from __future__ import annotations

import itertools
import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a crash, finds either the old text or the new, never a part."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def append_whole(path: Path, data: bytes) -> None:
    """Append to a file: all of `data` or, raising OSError, nothing."""
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
    """Rename what is at `path` to the first free of `name-1.ext`, `name-2.ext` …; None when nothing is there."""
    if not path.exists():
        return None
    candidates = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(1))
    aside = next(candidate for candidate in candidates if not candidate.exists())
    return path.rename(aside)
