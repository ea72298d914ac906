"""Turn an uploaded package into a snapshot. The upload is a tar or tar.gz of the package and of the files next to it.

    tar czf - trainer requirements.txt | …

The rules are those of unpacking (`unpacking.py`): plain files with relative names, each once, no links, no devices.
Directories are skipped. Files that are never part of a program are left out, as in a snapshot of a directory. A name in the
upload never decides where a file is written: the files go into a new archive, and jobs get that archive.
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
from footplate.jobs.package.snapshots import MAX_BYTES, SOURCE, Snapshot, check_size, write_archive
from footplate.jobs.package.unpacking import checked

_GZIP = b"\x1f\x8b"
_PIECE = 1 << 20


def receive(sent: BinaryIO, home: Path) -> Snapshot:
    """Make a snapshot from an upload.

    Args:
        sent: the tar or tar.gz, as a seekable file.
        home: the folder that keeps packages.

    Raises:
        PackageError: it isn't such an archive, has no package, has something that a package can't have, or is too large.
    """
    with tempfile.TemporaryFile() as plain:
        _inflate(sent, plain)
        try:
            with tarfile.open(fileobj=plain, mode="r:") as tar:
                return _snapshot(tar, home)
        except (tarfile.TarError, EOFError, UnicodeError, ValueError) as error:
            raise PackageError(f"the upload isn't a tar or tar.gz of a package: {error}.") from None


def _snapshot(tar: tarfile.TarFile, home: Path) -> Snapshot:
    files = checked(_files(tar), "the upload")
    if not any(PurePosixPath(name).name == "__init__.py" and len(PurePosixPath(name).parts) == 3 for name in files):
        raise PackageError(
            "the upload contains no package: expected a directory with an __init__.py, as `tar czf - trainer` sends it."
        )
    check_size({name.removeprefix(f"{SOURCE}/"): member.size for name, member in files.items()})

    # Lists of requirements are rewritten, without lines that name the package itself.
    lists: dict[str, bytes] = {}
    for name, member in files.items():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise PackageError(
                f"{name!r} isn't a UTF-8 name, so not every machine can have the file: rename it."
            ) from None
        plain = name.removeprefix(f"{SOURCE}/")
        if requirements.is_list(plain):
            lists[name] = requirements.portable(plain, _reader(tar, member)())
    members = [
        Member(
            name,
            partial(lists.__getitem__, name) if name in lists else _reader(tar, member),
            bool(member.mode & 0o100),
        )
        for name, member in files.items()
    ]
    digest, path = write_archive(members, home.absolute() / "packages")
    suspects = [
        name.removeprefix(f"{SOURCE}/")
        for name, member in files.items()
        if secrets.looks_secret(name, _reader(tar, member)()[: secrets.LOOKED_AT])
    ]
    warnings = [f"These files seem to contain secrets: {', '.join(suspects[:5])}. They are kept with the job."]
    sizes = tuple((name, member.size) for name, member in sorted(files.items()))
    return Snapshot(digest, path, sizes, tuple(warnings if suspects else ()))


def _files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The files of the upload, under their names in a snapshot. Directories, and files like `.git`, are left out."""
    for member in tar:
        path = PurePosixPath(member.name)
        if member.isdir() or any(fnmatchcase(part, pattern) for part in path.parts for pattern in LEFT_OUT):
            continue
        if path.is_absolute():
            raise PackageError(f"the upload: {member.name!r} can't be unpacked: expected a relative name.")
        member.name = f"{SOURCE}/{path}"
        yield member


def _reader(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Callable[[], bytes]:
    def read() -> bytes:
        file = tar.extractfile(member)
        # `checked` allows only plain files.
        assert file is not None
        content = file.read()
        if len(content) != member.size:
            raise PackageError("the upload ends in the middle of a file: send it again.")
        return content

    return read


def _inflate(sent: BinaryIO, plain: BinaryIO) -> None:
    """Write the uncompressed tar, up to the size of the largest package and tar's overhead."""
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
                    raise PackageError(f"the upload has more than {2 * MAX_BYTES // 2**20} MiB when it is unpacked.")
                plain.write(piece)
    except (OSError, EOFError, zlib.error) as error:
        raise PackageError(f"the upload isn't a tar.gz of a package: {error}.") from None
    plain.seek(0)
