"""`install`: a package that was taken, ready to run.

Without requirements it is unpacked, and the interpreter that runs Footplate runs it, with the package first in its path.
With them there is an environment (`environment.py`), whose interpreter runs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from footplate.core.version import LIBRARY
from footplate.jobs.package.environment_locks import Hold
from footplate.jobs.package.requirements import needed
from footplate.jobs.package.snapshots import PACKAGES, SOURCE, Snapshot
from footplate.jobs.package.unpacking import unpack
from footplate.jobs.package.virtualenv import Wanted, environment, our_packages


@dataclass(frozen=True)
class Installed:
    """How a program is run: `python -m MODULE`, with `env` over the environment that it gets.

    Attributes:
        python: the interpreter.
        env: variables.
        holds: what keeps the package and its environment from being deleted: `release` them when it has run.
    """

    python: Path
    env: dict[str, str]
    holds: tuple[Hold, ...]

    def release(self) -> None:
        """It is used no more."""
        for one in self.holds:
            one.release()


def install(snapshot: Snapshot, home: Path, log: TextIO) -> Installed:
    """Make a package ready to run. Safe to be called by several processes at once; the second time it is fast.

    Args:
        snapshot: the package.
        home: the directory in which packages and environments are kept.
        log: where pip says what it does, if there is something for it to do.

    Raises:
        PackageError: the archive is damaged, or what the package needs can't be installed.
    """
    home = home.absolute()
    os.utime(snapshot.path)  # its last use
    place, hold = unpack(snapshot.path, snapshot.digest, home)
    try:
        return _ready(place, hold, home, log)
    except BaseException:
        hold.release()
        raise


def _ready(place: Path, hold: Hold, home: Path, log: TextIO) -> Installed:
    source = place / SOURCE
    distributions = tuple(sorted((place / PACKAGES).glob("*")))
    python, holds = Path(sys.executable), (hold,)
    wanted = Wanted(source, tuple(needed(source, python)), distributions)
    if not wanted.nothing:
        python, held = environment(wanted, home, log)
        holds = (hold, held)
    path = [str(source)] if source.is_dir() else []
    return Installed(python, {"PYTHONPATH": os.pathsep.join([*path, *_own_place(our_packages())])}, holds)


def _own_place(installed: Iterable[str]) -> list[str]:
    """Where this Footplate is imported from, unless it is installed: a job is to have the one that submitted it."""
    place = LIBRARY
    return [] if place in installed else [place]
