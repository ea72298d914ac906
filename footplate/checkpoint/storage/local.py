"""Checkpoints on a disk of this machine.

A checkpoint is written to `.tmp-…` beside its target, synced, and renamed. No move between file systems is needed, and at
every moment the target is the old checkpoint or the new one. If the target exists, it is renamed to `.old-…` first and
deleted afterwards. If the process is killed in between, `clean_up` restores it.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal

from footplate.checkpoint.format.statefile import Frozen
from footplate.checkpoint.storage.base import META, STATE, SUFFIX, Store, marker
from footplate.core.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

TEMPORARY, _REPLACED = ".tmp-ckpt-", ".old-"


class LocalStore(Store):
    """A store on disk. Paths are `Path`s. The module's docstring describes it."""

    def prepare(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            probe = directory / f"{TEMPORARY}probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"ModelCheckpoint: {directory} can't be written to ({error.strerror}). "
                "Set another dirpath or default_root_dir."
            ) from None

    def clean_up(self, directory: Path) -> None:
        for old in directory.rglob(f"{_REPLACED}*{SUFFIX}"):
            target = _replaced_by(old)
            if target.exists():
                _discard(old)
            else:
                old.rename(target)
        for temporary in directory.rglob(f"{TEMPORARY}*"):
            _discard(temporary)

    def kind(self, path: Path) -> Literal["directory", "file"] | None:
        path = self.resolve(path)
        return "directory" if path.is_dir() else "file" if path.exists() else None

    def find(self, directory: Path, deep: bool = True) -> list[Path]:
        if not directory.is_dir():
            return []
        matches = directory.rglob(f"*{SUFFIX}") if deep else directory.glob(f"*{SUFFIX}")
        return sorted(path for path in matches if not path.is_symlink() and not _is_replaced(path))

    def resolve(self, path: Path) -> Path:
        target = path.resolve() if path.is_symlink() else path
        old = target.with_name(f"{_REPLACED}{target.name}")
        return old if old.exists() and not target.exists() else target

    def read_marker(self, path: Path) -> bytes | None:
        try:
            return (path / META).read_bytes()
        except OSError:
            return None

    def size(self, path: Path, name: str) -> int | None:
        file = path / name
        return file.stat().st_size if file.is_file() else None

    def open(self, path: Path, name: str) -> BinaryIO:
        try:
            return (path / name).open("rb")
        except OSError as error:
            raise CheckpointError(f"{path / name} can't be read: {error.strerror}.") from error

    def write(self, path: Path, state: Frozen, meta: dict[str, Any]) -> None:
        temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        try:
            temporary.mkdir(parents=True)
            with (temporary / STATE).open("xb", buffering=0) as file:
                written = state.write(file)
                os.fsync(file.fileno())
            with (temporary / META).open("xb") as file:
                file.write(marker(meta, written))
                file.flush()
                os.fsync(file.fileno())
            sync_directory(temporary)
            replace(temporary, path)
            sync_directory(path.parent)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise cannot_write(path, error) from error

    def write_file(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_directory(path.parent)
        except OSError as error:
            raise cannot_write(path, error) from error
        finally:
            temporary.unlink(missing_ok=True)

    def delete(self, path: Path) -> None:
        """Delete a checkpoint. It is renamed first, so that an interruption leaves no half of it under its name."""
        doomed = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        try:
            path.rename(doomed)
            for name in (META, STATE):
                (doomed / name).unlink(missing_ok=True)
            doomed.rmdir()
        except OSError:
            # The checkpoint is gone, or holds other files, or the directory can't be written to.
            shutil.rmtree(doomed, ignore_errors=True)

    def point(self, link: Path, target: Path) -> None:
        temporary = link.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        try:
            temporary.symlink_to(os.path.relpath(target, link.parent))
        except OSError as error:
            log.warning(
                "%s can't be linked to %s (%s). Resuming finds the checkpoint without the link.",
                link,
                target.name,
                error.strerror,
            )
            return

        # If a run was copied and the copy followed the link, then the link is a checkpoint of its own.
        if link.is_dir() and not link.is_symlink():
            replace(temporary, link)
        else:
            temporary.replace(link)

    def unpoint(self, link: Path) -> None:
        if link.is_symlink():
            link.unlink(missing_ok=True)


def _replaced_by(old: Path) -> Path:
    return old.with_name(old.name[len(_REPLACED) :])


def _is_replaced(path: Path) -> bool:
    """Return True for an `.old-…` whose replacement is complete."""
    return path.name.startswith(_REPLACED) and _replaced_by(path).exists()


def replace(temporary: Path, path: Path) -> None:
    """Rename a finished checkpoint to its path, and remove one that was there."""
    if not os.path.lexists(path):
        temporary.rename(path)
        return
    if path.is_symlink():
        path.unlink()
        temporary.rename(path)
        return

    old = path.with_name(f"{_REPLACED}{path.name}")
    _discard(old)
    path.rename(old)
    temporary.rename(path)
    _discard(old)


def _discard(path: Path) -> None:
    """Remove a directory, a file or a link if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Sync the entries of a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: Exception) -> CheckpointError:
    """The error for a checkpoint that could not be written."""
    code = getattr(error, "errno", None)
    free = ""
    existing = next((parent for parent in path.absolute().parents if parent.exists()), None)
    if existing is not None:
        free = f" ({shutil.disk_usage(existing).free / 1e6:,.0f} MB free)"
    if code == errno.ENOSPC:
        return CheckpointError(
            f"The disk is full{free}: the checkpoint {path} could not be written. Earlier checkpoints are complete. "
            'Free some space, or set another default_root_dir, and resume with ckpt_path="last".'
        )
    reason = os.strerror(code) if code else (str(error) or type(error).__name__).splitlines()[0]
    return CheckpointError(f"The checkpoint {path} could not be written: {reason}{free}.")
