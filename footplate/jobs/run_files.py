"""Files that the runs of a job write into its job directory: `metrics.csv`, `monitor.jsonl`.

A trainer's run is in the job directory by default, and Lightning's loggers write some directories below. The search goes
`DEPTH` levels deep, and doesn't follow links. Files older than the job belong to another job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

DEPTH = 4
_DIRECTORIES = 2_000


def files_below(root: Path, name: str, since: float) -> Iterator[Path]:
    """Find the files of a name below a directory that are newer than `since`."""
    visited = 0
    level = [root]
    for _ in range(DEPTH):
        below: list[Path] = []
        for directory in level:
            visited += 1
            if visited > _DIRECTORIES:
                return
            try:
                entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
            except OSError:
                continue
            for entry in entries:
                if entry.name == name and _is_newer(entry, since):
                    yield directory / entry.name
                elif entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    below.append(directory / entry.name)
        level = below


def _is_newer(entry: os.DirEntry[str], since: float) -> bool:
    with suppress(FileNotFoundError):
        return entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_mtime >= since
    return False
