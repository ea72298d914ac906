"""A package that was sent from elsewhere, as a tar or tar.gz of what lies beside and below it, → an archive of ours.

    tar czf - trainer requirements.txt | …

What is in it goes by the same rules as what is unpacked (`unpacking.py`): plain files with relative names, none twice,
no link, no device. Directories are passed over, and what is never part of a program is left out, as when a package is
taken here. Nothing is written to where a name in the archive says: the files go into an archive of ours, and that is
what jobs get.
"""

from __future__ import annotations

import gzip
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from footplate.core.errors import PackageError
from footplate.jobs.package import requirements, secrets
from footplate.jobs.package.archive import Member
from footplate.jobs.package.files import LEFT_OUT
from footplate.jobs.package.snapshots import MAX_BYTES, SOURCE, Snapshot, check_size, put_away
from footplate.jobs.package.unpacking import checked

_GZIP = b"\x1f\x8b"
_PIECE = 1 << 20


def receive(sent: BinaryIO, home: Path) -> Snapshot:
    """Take a package out of a file with what was sent.

    Args:
        sent: the tar or tar.gz, which can be sought in.
        home: the directory in which packages are kept.

    Raises:
        PackageError: it is no such archive, it holds no package, or what can't be in one; it is too large.
    """
    with tempfile.TemporaryFile() as plain:
        _inflate(sent, plain)
        try:
            with tarfile.open(fileobj=plain, mode="r:") as tar:
                return _take(tar, home)
        except (tarfile.TarError, EOFError, UnicodeError, ValueError) as error:
            raise PackageError(f"what was sent is no tar or tar.gz of a package: {error}.") from None


def _take(tar: tarfile.TarFile, home: Path) -> Snapshot:
    found = checked(_files(tar), "what was sent")
    if not any(PurePosixPath(name).name == "__init__.py" and len(PurePosixPath(name).parts) == 3 for name in found):
        raise PackageError(
            "what was sent holds no package: expected a directory with an __init__.py, as `tar czf - trainer` sends it."
        )
    check_size({name.removeprefix(f"{SOURCE}/"): one.size for name, one in found.items()})
    lists: dict[str, bytes] = {}
    for name, member in found.items():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise PackageError(f"{name!r} is no name in UTF-8, which not every machine can have: rename it.") from None
        plain = name.removeprefix(f"{SOURCE}/")
        if requirements.is_list(plain):
            lists[name] = requirements.portable(plain, _reader(tar, member)())
    members = [
        Member(name, partial(lists.__getitem__, name) if name in lists else _reader(tar, one), bool(one.mode & 0o100))
        for name, one in found.items()
    ]
    digest, path = put_away(members, home.absolute() / "packages")
    suspects = [
        name.removeprefix(f"{SOURCE}/")
        for name, one in found.items()
        if secrets.looks_secret(name, _reader(tar, one)()[: secrets.LOOKED_AT])
    ]
    warnings = [f"The package holds what looks like secrets: {', '.join(suspects[:5])}. They are kept with the job."]
    files = tuple((name, one.size) for name, one in sorted(found.items()))
    return Snapshot(digest, path, files, tuple(warnings if suspects else ()))


def _files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Its members, but for directories and what is never part of a program, under their names in an archive of ours."""
    for member in tar:
        path = PurePosixPath(member.name)
        if member.isdir() or any(fnmatchcase(part, one) for part in path.parts for one in LEFT_OUT):
            continue
        if path.is_absolute():
            raise PackageError(f"what was sent: {member.name!r} can't be unpacked: expected a relative name.")
        member.name = f"{SOURCE}/{path}"
        yield member


def _reader(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Callable[[], bytes]:
    def read() -> bytes:
        file = tar.extractfile(member)
        assert file is not None  # it is a plain one
        content = file.read()
        if len(content) != member.size:
            raise PackageError("what was sent ends in the middle of a file: send it again.")
        return content

    return read


def _inflate(sent: BinaryIO, plain: BinaryIO) -> None:
    """Write the plain tar, up to what a package may have and what tar adds to it."""
    zipped = sent.read(2) == _GZIP
    sent.seek(0)
    if not zipped:
        shutil.copyfileobj(sent, plain, _PIECE)
        plain.seek(0)
        return
    size = 0
    try:
        with gzip.open(sent) as file:
            while piece := file.read(_PIECE):
                size += len(piece)
                if size > 2 * MAX_BYTES:
                    raise PackageError(f"what was sent has more than {2 * MAX_BYTES // 2**20} MiB when it is unpacked.")
                plain.write(piece)
    except (OSError, EOFError, zlib.error) as error:
        raise PackageError(f"what was sent is no tar.gz of a package: {error}.") from None
    plain.seek(0)
