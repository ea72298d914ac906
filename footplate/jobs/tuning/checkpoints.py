"""Copies of checkpoints that trials begin from, which nobody deletes or replaces while the trials need them.

A checkpoint belongs to another training, whose savers may delete it. So its files are linked, or copied from another disk,
into a directory that appears under its name when it is complete. The files of a checkpoint never change, so a link is as
good as a copy, and costs nothing. One process at a time makes the copies of a tuning.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from footplate.core.errors import ConfigError


def keep_checkpoint(source: Path, target: Path) -> None:
    """Link the files of a checkpoint into a directory of its own. A directory that is there already is replaced.

    Args:
        source: the directory of the checkpoint.
        target: the directory to make.

    Raises:
        ConfigError: a file of the checkpoint is missing, or the directory can't be written.
    """
    temporary, replaced = target.with_name(f".new-{target.name}"), target.with_name(f".old-{target.name}")
    try:
        for leftover in (temporary, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        for file in sorted(source.iterdir()):
            _link(file, temporary / file.name)
        if target.is_dir():
            target.rename(replaced)
        temporary.rename(target)
    except OSError as error:
        raise ConfigError(f"the checkpoint {source} can't be kept as {target}: {error}") from error
    shutil.rmtree(replaced, ignore_errors=True)


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:
        # It is on another disk, or the disk has no links.
        shutil.copyfile(file, target)
