"""Delete what no job needs: packages, their unpacked files, environments, and the remains of killed processes.

    in use      a package: by a job that hasn't ended, or by a job of another store
                an unpacked package, an environment, an attempt's directory on a node: while an attempt holds its lock
                (`package/environment_locks.py`)
    not in use  deleted when it has been unused for some time; the remains of killed processes, after a day

Each use sets the time of last change. Things are first moved into `trash/`, then deleted, since deleting takes time.

**On the machine of the submission** (`clean`), things are moved under the lock that a submission holds from its snapshot
until the job is in the store. So a package never disappears during a submission. Supervisors clean once a day, when their
job has ended, with `UNUSED_S`. A failed job can be resubmitted as long as its package exists; an environment is created
again from the package.

**On a node of a cluster** (`clean_node`), attempts bring their packages, and no store there knows their jobs. The actor of
an attempt cleans while it runs, with `NODE_UNUSED_S`. It leaves packages alone, since they belong to jobs that were
submitted on that node.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from footplate.jobs.home import PACKAGE, Home
from footplate.jobs.package.virtualenv import READY
from footplate.jobs.states import FINAL
from footplate.jobs.store.jobs import Store
from footplate.jobs.supervision.locks import Held, held

UNUSED_S = 30 * 86400.0
NODE_UNUSED_S = 7 * 86400.0
_DAY_S = 86400.0


@dataclass(frozen=True)
class Waste:
    """A deleted thing.

    Attributes:
        kind: `package`, `unpacked`, `environment`, `guest` (`Home.node_directory`), or `left over` from a killed process.
        path: its path before it was deleted.
        nbytes: its size.
        unused_s: the time since its last use.
    """

    kind: str
    path: Path
    nbytes: int
    unused_s: float


def clean(home: Home, store: Store, unused_s: float, dry_run: bool = False) -> list[Waste]:
    """Delete what no job needs and what has been unused for `unused_s`. Returns it, also in a dry run.

    Raises:
        ConfigError: the store can't be read.
    """
    with home.exclusive():
        wastes, trash = _take_out(home, [*_packages(home, store, unused_s), *_derived(home, unused_s)], dry_run)
    _delete(trash)
    return wastes


def clean_node(home: Home) -> None:
    """Delete what attempts left on a node of a cluster, and what has been unused for `NODE_UNUSED_S`."""
    _delete(_take_out(home, list(_derived(home, NODE_UNUSED_S)))[1])


def clean_daily(home: Home, store: Store) -> None:
    """Clean, unless that was done in the last 24 hours."""
    mark = home.root / "cleaned"
    if not mark.exists() or time.time() - mark.stat().st_mtime > _DAY_S:
        mark.touch()
        clean(home, store, UNUSED_S)


def put_into_trash(home: Home, path: Path) -> Path:
    """Move a file or folder, if it exists, into the trash. Returns its path there."""
    trash = home.root / "trash"
    trash.mkdir(mode=0o700, exist_ok=True)
    target = trash / f"{path.name}-{time.time_ns()}"
    with suppress(FileNotFoundError):
        path.rename(target)
    return target


@dataclass(frozen=True)
class _Candidate:
    """A thing that may be deleted when it has been unused for `unused_s`. `used` is the file with the time of last use."""

    kind: str
    path: Path
    used: Path
    lock: Path
    unused_s: float


def _take_out(home: Home, candidates: Iterable[_Candidate], dry_run: bool = False) -> tuple[list[Waste], list[Path]]:
    """Move old candidates into the trash. Returns what they were, and their paths in the trash."""
    wastes, trash = [], []
    for candidate in candidates:
        with suppress(Held, FileNotFoundError), held(candidate.lock):
            unused = time.time() - candidate.used.stat().st_mtime
            if unused < candidate.unused_s:
                continue
            wastes.append(Waste(candidate.kind, candidate.path, _size(candidate.path), unused))
            if not dry_run:
                trash.append(put_into_trash(home, candidate.path))
                # No other attempt will use this name, so its lock can go.
                if candidate.kind == "guest":
                    candidate.lock.unlink()
    return wastes, trash


def _delete(trash: Iterable[Path]) -> None:
    for path in trash:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _packages(home: Home, store: Store, unused_s: float) -> Iterator[_Candidate]:
    """The packages that no job needs."""
    needed = _needed(home, store)
    for path in home.root.glob("packages/*.tar"):
        if path.stem not in needed:
            yield _Candidate("package", path, path, _unlocked(home), unused_s)


def _derived(home: Home, unused_s: float) -> Iterator[_Candidate]:
    """Unpacked packages, environments, directories of attempts on a node, and remains of killed processes."""
    for path in home.root.glob("unpacked/*/*/"):
        if not path.name.startswith("."):
            yield _Candidate("unpacked", path, path, path.with_suffix(".lock"), unused_s)
    for path in home.root.glob("environments/*/"):
        used = path / READY if (path / READY).exists() else path
        yield _Candidate("environment", path, used, path.with_suffix(".lock"), unused_s)
    for path in home.root.glob("guests/*/"):
        yield _Candidate("guest", path, path, path.with_suffix(".lock"), unused_s)
    for pattern in ("packages/.*.part", "unpacked/*/.*/", "trash/*"):
        for path in home.root.glob(pattern):
            # A younger file may still be written.
            yield _Candidate("left over", path, path, _unlocked(home), _DAY_S)


def _unlocked(home: Home) -> Path:
    """Return the lock for things that no other process locks."""
    return home.root / "trash.lock"


def _needed(home: Home, store: Store) -> set[str]:
    """The digests of the packages of jobs that haven't ended, or are in another store."""
    ended = {job.name for state in FINAL for job in store.list(state)}
    digests = home.root.glob(f"jobs/*/{PACKAGE}")
    return {path.read_text() for path in digests if path.parent.name not in ended}


def _size(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    files = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(file.lstat().st_size for file in files)
