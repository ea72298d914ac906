"""`install`: make a snapshot ready to run.

A package without requirements is unpacked. The interpreter that runs Footplate runs it, with the package first in its path.
A package with requirements gets a virtual environment (`virtualenv.py`), and that environment's interpreter runs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from footplate.core.identity.module_origin import package_directories
from footplate.core.version import LIBRARY
from footplate.jobs.package.environment_locks import Hold
from footplate.jobs.package.requirements import needed
from footplate.jobs.package.snapshots import PACKAGES, SOURCE, Snapshot
from footplate.jobs.package.unpacking import unpack
from footplate.jobs.package.virtualenv import Wanted, environment


@dataclass(frozen=True)
class Installed:
    """A program that is ready to run, as `python -m MODULE` with `env` added to the environment.

    Attributes:
        python: the interpreter.
        env: variables.
        holds: the locks that protect the package and its environment from deletion. Call `release` when it has run.
    """

    python: Path
    env: dict[str, str]
    holds: tuple[Hold, ...]

    def release(self) -> None:
        """Release the locks."""
        for hold in self.holds:
            hold.release()


def install(snapshot: Snapshot, home: Path, log: TextIO) -> Installed:
    """Make a package ready to run. Several processes may do so at once. The second time it is fast.

    Args:
        snapshot: the package.
        home: the folder of packages and environments.
        log: gets pip's output, if pip runs.

    Raises:
        PackageError: the archive is damaged, or a requirement can't be installed.
    """
    home = home.absolute()
    # The modification time is the time of its last use.
    os.utime(snapshot.path)
    directory, hold = unpack(snapshot.path, snapshot.digest, home)
    try:
        return _ready(directory, hold, home, log)
    except BaseException:
        hold.release()
        raise


def _ready(directory: Path, hold: Hold, home: Path, log: TextIO) -> Installed:
    source = directory / SOURCE
    distributions = tuple(sorted((directory / PACKAGES).glob("*")))
    python, holds = Path(sys.executable), (hold,)
    wanted = Wanted(source, tuple(needed(source, python)), distributions)
    if not wanted.nothing:
        python, environment_hold = environment(wanted, home, log)
        holds = (hold, environment_hold)
    path = [str(source)] if source.is_dir() else []
    return Installed(python, {"PYTHONPATH": os.pathsep.join([*path, *_own_library(package_directories())])}, holds)


def _own_library(installed: Iterable[str]) -> list[str]:
    """The directory of this Footplate, unless it is installed: a job uses the Footplate that submitted it."""
    return [] if LIBRARY in installed else [LIBRARY]
