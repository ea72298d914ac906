"""The files of a package.

`--package-path trainer` names a directory that Python imports as `trainer`. A package consists of

- all of its files, data included. Files that are never part of a program (`LEFT_OUT`: `.git`, `__pycache__`, virtual
  environments, checkpoints) are left out. So are files that git ignores, by `.gitignore` files in the package, and above it
  up to the root of the repository;
- the files next to it for its installation (`BESIDE`): `setup.py`, `pyproject.toml`, `requirements.txt`. With a `setup.py`
  or a `pyproject.toml`, the other packages next to it belong to it, as `find_packages()` finds them.

A link to a file or directory inside is replaced by its target. A link that leads outside is refused, since its target would
differ on another machine. The package itself may be a link. It then has the link's name, and the files of the link's
target.
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
        path: its path on this machine.
        executable: its owner may execute it.
    """

    name: str
    path: Path
    executable: bool


@dataclass(frozen=True)
class Collected:
    """The files of a package by name, and the paths that `.gitignore` excluded."""

    files: tuple[Found, ...]
    ignored: tuple[str, ...]


def collect(package: Path) -> Collected:
    """Collect the files of the package in a directory, and those next to it that belong to it.

    Raises:
        PackageError: the directory isn't a package, or has something that a package can't have.
    """
    if not (package / "__init__.py").is_file():
        raise PackageError(f"{str(package)!r} isn't a package: expected a directory with an __init__.py.")
    package = by_own_name(package)
    walk = _Walk(package.parent, package.resolve(), [])
    files = [*walk.into(package, gitignore.above(package), ())]
    for beside in sorted(package.parent.iterdir()):
        if beside.is_file() and any(fnmatchcase(beside.name, pattern) for pattern in BESIDE):
            files.append(walk.file(beside))
    if any((package.parent / name).is_file() for name in PROJECT):
        for other in sorted(package.parent.iterdir()):
            if other != package and other.is_dir() and (other / "__init__.py").is_file() and not _left_out(other):
                files += walk.into(other, gitignore.above(other), ())
    return Collected(tuple(sorted(files, key=lambda file: file.name)), tuple(walk.ignored))


def by_own_name(package: Path) -> Path:
    """The absolute path of a package. Only its last part may be a link, since Python imports it by that name."""
    package = package.absolute()
    return package.resolve() if package.name == ".." else package.parent.resolve() / package.name


@dataclass(frozen=True)
class _Walk:
    """Walks through directories below `root`, and records what `.gitignore` excludes.

    Attributes:
        root: the directory of the package.
        package: the package's real path, which is elsewhere if the package is a link.
        ignored: the paths that `.gitignore` excludes.
    """

    root: Path
    package: Path
    ignored: list[str]

    def into(self, directory: Path, rules: Sequence[gitignore.Rules], parents: tuple[Path, ...]) -> Iterator[Found]:
        """Every file below a directory. `parents` are the real paths of the directories that led to it."""
        real = directory.resolve()
        if real in parents:
            raise PackageError(f"{self._name(directory)} is a link to a directory that contains it: remove it.")
        rules = [*rules, *gitignore.read(directory)]
        for path in sorted(directory.iterdir()):
            if _left_out(path):
                continue
            if gitignore.ignored(path, path.is_dir() and not path.is_symlink(), rules):
                self.ignored.append(self._name(path))
            elif path.is_symlink() and not path.exists():
                raise PackageError(
                    f"{self._name(path)} is a link to {str(path.readlink())!r}, which doesn't exist: remove it."
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
            raise PackageError(f"{self._name(path)} isn't a plain file, so it can't be part of a package: remove it.")
        return Found(self._name(path), path, bool(mode & stat.S_IXUSR))

    def _stays_inside(self, path: Path) -> None:
        if not path.is_symlink():
            return
        target = path.resolve()
        if not target.is_relative_to(self.root) and not target.is_relative_to(self.package):
            raise PackageError(
                f"{self._name(path)} is a link to {str(path.readlink())!r}, outside of the package. Copy its target into "
                "the package, or remove the link."
            )

    def _name(self, path: Path) -> str:
        name = path.relative_to(self.root).as_posix()
        try:
            name.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(name)
            raise PackageError(
                f"{shown!r} isn't a UTF-8 name, so not every machine can have the file: rename it."
            ) from None
        return name


def _left_out(path: Path) -> bool:
    return any(fnmatchcase(path.name, pattern) for pattern in LEFT_OUT) or (path / "pyvenv.cfg").is_file()
