"""What no job needs any more, deleted: packages, what was unpacked of them, environments, and what a kill has left.

    in use      a package: of a job that has not ended, or that isn't of this store
                what is unpacked, an environment, the directory of a guest: while an attempt holds its lock
                (`package/environment_locks.py`)
    not in use  deleted once nobody has used it for so long; what a kill has left, after a day

Each use sets the time of last change. What goes is moved into `trash/` first; deleting, which takes time, comes after.

**Where jobs are submitted** (`clean`) what goes is moved under the lock that a submission holds from taking its package to
putting its job into the store, so a package that is being submitted is never half gone. Supervisors do it once a day, when
their job has ended, with `UNUSED_S`. A job that has failed can be resubmitted as long as its package is there. An
environment is made anew from the package.

**On a node of a cluster** (`clean_node`) attempts are guests: their packages come with them, and no store there knows their
jobs. Whoever runs one cleans while it runs, with `NODE_UNUSED_S`. Packages are left alone: they are of jobs that were
submitted there, if there are any.
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
from footplate.jobs.package.environment import READY
from footplate.jobs.states import FINAL
from footplate.jobs.store.jobs import Store
from footplate.jobs.supervision.locks import Held, held

UNUSED_S = 30 * 86400.0
NODE_UNUSED_S = 7 * 86400.0
_DAY_S = 86400.0


@dataclass(frozen=True)
class Waste:
    """What is deleted.

    Attributes:
        kind: `package`, `unpacked`, `environment`, `guest`, or `left over` of something that was killed.
        path: where it lies, or lay.
        nbytes: how large it is.
        unused_s: since when nobody has used it.
    """

    kind: str
    path: Path
    nbytes: int
    unused_s: float


def clean(home: Home, store: Store, unused_s: float, dry_run: bool = False) -> list[Waste]:
    """Delete what no job needs and nobody has used for so many seconds; returns it, or what would go.

    Raises:
        ConfigError: the store can't be read.
    """
    with home.alone():
        found, trash = _take_out(home, [*_packages(home, store, unused_s), *_made(home, unused_s)], dry_run)
    _delete(trash)
    return found


def clean_node(home: Home) -> None:
    """Delete what attempts have left on a node of a cluster and none has used for `NODE_UNUSED_S`."""
    _delete(_take_out(home, list(_made(home, NODE_UNUSED_S)))[1])


def clean_daily(home: Home, store: Store) -> None:
    """Clean, unless somebody has done so in the last 24 hours."""
    mark = home.root / "cleaned"
    if not mark.exists() or time.time() - mark.stat().st_mtime > _DAY_S:
        mark.touch()
        clean(home, store, UNUSED_S)


def put_into_trash(home: Home, path: Path) -> Path:
    """Move something, if it is there, to where nobody looks for it; returns where that is."""
    trash = home.root / "trash"
    trash.mkdir(mode=0o700, exist_ok=True)
    there = trash / f"{path.name}-{time.time_ns()}"
    with suppress(FileNotFoundError):
        path.rename(there)
    return there


@dataclass(frozen=True)
class _Candidate:
    """What may go if nobody has used it for so long. `used` is the file whose time is that of its last use."""

    kind: str
    path: Path
    used: Path
    lock: Path
    unused_s: float


def _take_out(home: Home, candidates: Iterable[_Candidate], dry_run: bool = False) -> tuple[list[Waste], list[Path]]:
    """Move what is old enough into the trash; returns what it was, and where it is now."""
    found, trash = [], []
    for one in candidates:
        with suppress(Held, FileNotFoundError), held(one.lock):
            unused = time.time() - one.used.stat().st_mtime
            if unused < one.unused_s:
                continue
            found.append(Waste(one.kind, one.path, _size(one.path), unused))
            if not dry_run:
                trash.append(put_into_trash(home, one.path))
                if one.kind == "guest":  # nobody will come by its name again
                    one.lock.unlink()
    return found, trash


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


def _made(home: Home, unused_s: float) -> Iterator[_Candidate]:
    """What attempts make of packages, where they run as guests, and what a kill has left."""
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
            yield _Candidate("left over", path, path, _unlocked(home), _DAY_S)  # before, somebody may be at it


def _unlocked(home: Home) -> Path:
    """The lock of what nobody holds."""
    return home.root / "trash.lock"


def _needed(home: Home, store: Store) -> set[str]:
    """The digests of the packages of jobs that have not ended, or are of another store."""
    ended = {one.name for state in FINAL for one in store.list(state)}
    notes = home.root.glob(f"jobs/*/{PACKAGE}")
    return {note.read_text() for note in notes if note.parent.name not in ended}


def _size(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    files = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(one.lstat().st_size for one in files)
