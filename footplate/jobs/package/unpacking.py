"""Unpack an archive into a directory. That is safe for any archive.

A snapshot contains only plain files, each below `source/` or `packages/`. Anything else (an absolute name, `..`, a link, a
device, a name given twice) is refused before a byte is written. The directory appears complete, by a rename.

The files aren't synced to disk, since that takes longer than unpacking, so a power failure may leave some of them empty.
Therefore they are used only until the next boot, and then unpacked again from the archive, which was synced.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from footplate.core.errors import PackageError
from footplate.jobs.package.archive import EXECUTABLE, PLAIN
from footplate.jobs.package.environment_locks import Hold
from footplate.jobs.package.snapshots import MAX_BYTES, PACKAGES, SOURCE
from footplate.jobs.supervision.identity import boot

_MAX_MEMBERS = 200_000


def unpack(archive: Path, digest: str, home: Path) -> tuple[Path, Hold]:
    """Unpack an archive into `home/unpacked/BOOT/DIGEST`, unless it is there.

    Returns:
        The directory, and the lock that protects it until it is released.

    Raises:
        PackageError: the archive has another digest, or isn't a snapshot.
    """
    target = home / "unpacked" / boot() / digest
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    hold = Hold(target.with_suffix(".lock"))
    try:
        _unpack(archive, digest, target)
    except BaseException:
        hold.release()
        raise
    # The modification time is the time of its last use.
    os.utime(target)
    return target, hold


def _unpack(archive: Path, digest: str, target: Path) -> None:
    if target.is_dir():
        return
    with archive.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise PackageError(f"{archive} has changed since the job was submitted. Submit the job again.")
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix="."))
    try:
        extract(archive, scratch)
        scratch.rename(target)
    except OSError:
        # If the directory exists, another process has unpacked the same files first.
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def extract(archive: Path, into: Path) -> None:
    """Write the files of an archive below a directory.

    Raises:
        PackageError: the archive has anything but plain files with allowed names.
    """
    try:
        with tarfile.open(archive, "r:") as tar:
            members = checked(tar, str(archive))
            for name, member in members.items():
                path = into / name
                path.parent.mkdir(parents=True, exist_ok=True)
                mode = EXECUTABLE if member.mode & 0o100 else PLAIN
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                    shutil.copyfileobj(tar.extractfile(member), out)  # pyright: ignore[reportArgumentType]
    except (tarfile.TarError, EOFError, UnicodeError, ValueError) as error:
        raise PackageError(f"{archive} isn't an archive of a package: {error}.") from None


def checked(members: Iterable[tarfile.TarInfo], archive: str) -> dict[str, tarfile.TarInfo]:
    """Return the members of an archive by name, if all of them are plain files with allowed names.

    Args:
        members: the members.
        archive: the archive's name in messages.

    Raises:
        PackageError: a member isn't allowed.
    """
    files: dict[str, tarfile.TarInfo] = {}
    total = 0
    for member in members:
        path = PurePosixPath(member.name)
        parts = path.parts
        if not member.isreg() or member.issparse():
            raise _refused(archive, member, "it isn't a plain file")
        if len(parts) < 2 or parts[0] not in (SOURCE, PACKAGES) or ".." in parts or "\0" in member.name:
            raise _refused(archive, member, f"expected a name below {SOURCE}/ or {PACKAGES}/")
        if str(path) in files:
            raise _refused(archive, member, "it occurs twice")
        total += member.size
        if total > 2 * MAX_BYTES or len(files) >= _MAX_MEMBERS:
            raise _refused(archive, member, "with it the archive is larger than any package may be")
        files[str(path)] = member
    for name in files:
        if any(str(parent) in files for parent in PurePosixPath(name).parents):
            raise _refused(archive, files[name], "its path leads through a file")
    return files


def _refused(archive: str, member: tarfile.TarInfo, why: str) -> PackageError:
    return PackageError(f"{archive}: {member.name!r} can't be unpacked: {why}.")
