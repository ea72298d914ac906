"""Which files belong to a package.

`--package-path trainer` names a directory that Python imports as `trainer`. In go

- all of its files, data too, but for what is never part of a program (`LEFT_OUT`: `.git`, `__pycache__`, virtual
  environments, checkpoints) and for what git is told to leave out: by `.gitignore` files in it, and above it up to the
  root of the repository;
- from the directory above it what says how it is installed (`BESIDE`): `setup.py`, `pyproject.toml`, `requirements.txt`,
  and, where there is a `setup.py` or a `pyproject.toml`, the other packages there, as `find_packages()` finds them.

A link within all this goes in as the file that it leads to. One that leads out is refused: what lies there would be
another thing on another machine. The package itself may be a link. It then has the link's name, and the files of the
directory that the link leads to.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from footplate.core.errors import PackageError
from footplate.jobs.package import gitignore

LEFT_OUT = (
    ".git", ".hg", ".svn", "__pycache__", "*.pyc", "*.egg-info", ".venv", ".tox", ".nox", ".mypy_cache", ".pytest_cache",
    ".ruff_cache", ".hypothesis", ".ipynb_checkpoints", ".idea", ".vscode", ".DS_Store", "node_modules", "*.ckpt", "mlruns",
    "lightning_logs",
)  # fmt: skip
PROJECT = ("setup.py", "pyproject.toml")
BESIDE = (
    *PROJECT,
    "setup.cfg",
    "MANIFEST.in",
    "requirements*.txt",
    "constraints*.txt",
    "README*",
    "LICENSE*",
    "VERSION",
)


@dataclass(frozen=True)
class Found:
    """A file of a package.

    Attributes:
        name: its path in the archive, such as `trainer/task.py`.
        path: where it lies now.
        executable: whether its owner may execute it.
    """

    name: str
    path: Path
    executable: bool


@dataclass(frozen=True)
class Collected:
    """The files of a package by name, and the paths that `.gitignore` kept out."""

    files: tuple[Found, ...]
    ignored: tuple[str, ...]


def collect(package: Path) -> Collected:
    """The files of the package in a directory, and what belongs to it from the directory above.

    Raises:
        PackageError: it is no package, or something in it can't go in.
    """
    if not (package / "__init__.py").is_file():
        raise PackageError(f"{str(package)!r} is no package: expected a directory with an __init__.py.")
    package = by_own_name(package)
    walk = _Walk(package.parent, package.resolve(), [])
    found = [*walk.into(package, gitignore.above(package), ())]
    for beside in sorted(package.parent.iterdir()):
        if beside.is_file() and any(fnmatchcase(beside.name, pattern) for pattern in BESIDE):
            found.append(walk.file(beside))
    if any((package.parent / name).is_file() for name in PROJECT):
        for other in sorted(package.parent.iterdir()):
            if other != package and other.is_dir() and (other / "__init__.py").is_file() and not _left_out(other):
                found += walk.into(other, gitignore.above(other), ())
    return Collected(tuple(sorted(found, key=lambda one: one.name)), tuple(walk.ignored))


def by_own_name(package: Path) -> Path:
    """The absolute path of a package, in which only its last part may be a link: Python imports it by that name."""
    package = package.absolute()
    return package.resolve() if package.name == ".." else package.parent.resolve() / package.name


@dataclass(frozen=True)
class _Walk:
    """Goes through directories below `root`, and notes what `.gitignore` keeps out.

    Attributes:
        root: the directory in which the package is.
        package: the package's real path, which is elsewhere if the package is a link.
        ignored: what `.gitignore` keeps out.
    """

    root: Path
    package: Path
    ignored: list[str]

    def into(self, directory: Path, rules: Sequence[gitignore.Rules], parents: tuple[Path, ...]) -> Iterator[Found]:
        """Every file below a directory. `parents`: the real paths of those that led here."""
        real = directory.resolve()
        if real in parents:
            raise PackageError(f"{self._name(directory)} is a link to a directory that it lies in: remove it.")
        rules = [*rules, *gitignore.read(directory)]
        for path in sorted(directory.iterdir()):
            if _left_out(path):
                continue
            if gitignore.ignored(path, path.is_dir() and not path.is_symlink(), rules):
                self.ignored.append(self._name(path))
            elif path.is_symlink() and not path.exists():
                raise PackageError(
                    f"{self._name(path)} is a link to {str(path.readlink())!r}, where nothing is: remove it."
                )
            elif path.is_dir():
                self._stays_inside(path)
                yield from self.into(path, rules, (*parents, real))
            else:
                yield self.file(path)

    def file(self, path: Path) -> Found:
        self._stays_inside(path)
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise PackageError(f"{self._name(path)} is no plain file, so it can't be part of a package: remove it.")
        return Found(self._name(path), path, bool(mode & stat.S_IXUSR))

    def _stays_inside(self, path: Path) -> None:
        if not path.is_symlink():
            return
        target = path.resolve()
        if not target.is_relative_to(self.root) and not target.is_relative_to(self.package):
            raise PackageError(
                f"{self._name(path)} is a link to {str(path.readlink())!r}, outside of the package. Copy what it leads to "
                "into the package, or remove the link."
            )

    def _name(self, path: Path) -> str:
        name = path.relative_to(self.root).as_posix()
        try:
            name.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(name)
            raise PackageError(f"{shown!r} is no name in UTF-8, which not every machine can have: rename it.") from None
        return name


def _left_out(path: Path) -> bool:
    return any(fnmatchcase(path.name, one) for one in LEFT_OUT) or (path / "pyvenv.cfg").is_file()
