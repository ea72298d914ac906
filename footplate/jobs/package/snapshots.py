"""`snapshot`: a copy of the program as it is now, under a name that identifies its contents.

    source/trainer/task.py, source/requirements.txt, …    the package, and the files next to it (`files.py`)
    packages/helpers-1.0-py3-none-any.whl, …              the files that `--packages` names: local, gs:// or s3://

The archive is written under another name and renamed, so it is complete or absent. A second snapshot of an unchanged
program is the same file.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from footplate.core.errors import PackageError
from footplate.jobs.package import archive, requirements, secrets
from footplate.jobs.package.archive import Member
from footplate.jobs.package.files import Found, collect

# The largest working directory that Ray accepts.
MAX_BYTES = 500 * 2**20
SOURCE, PACKAGES = "source", "packages"
DISTRIBUTIONS = (".whl", ".tar.gz", ".zip")
_SHOWN = 5


@dataclass(frozen=True)
class Snapshot:
    """A copy of a program.

    Attributes:
        digest: the digest of its contents; 64 hexadecimal digits.
        path: the archive.
        files: name and size in bytes of each file, sorted by name.
        warnings: what the user may not intend, one sentence each.
    """

    digest: str
    path: Path
    files: tuple[tuple[str, int], ...]
    warnings: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The number of files, their size, and some names, in a sentence."""
        names = [name.partition("/")[2] for name, _ in self.files]
        size = sum(nbytes for _, nbytes in self.files) / 2**10
        shown = f"{size:.1f} KiB" if size < 2**10 else f"{size / 2**10:.1f} MiB"
        return f"Its package has {len(names)} file{'s' * (len(names) != 1)}, {shown}: {_some(names)}."


def snapshot(package_path: Path | None, packages: Sequence[str], home: Path) -> Snapshot:
    """Copy a program as it is now.

    Args:
        package_path: the directory of its package; None if `packages` bring the program.
        packages: wheels and source distributions: paths, or URIs of gs:// and s3://.
        home: the folder that keeps packages. It is created.

    Raises:
        PackageError: it isn't a package, or is too large; a file can't be read, or can't be part of a package.
    """
    collected = collect(package_path) if package_path is not None else None
    files = collected.files if collected else ()
    lists = {file.name: _read(file.path) for file in files if requirements.is_list(file.name)}
    kept = {name: requirements.portable(name, content) for name, content in lists.items()}
    members = [
        Member(
            f"{SOURCE}/{file.name}",
            _value(kept[file.name]) if file.name in kept else partial(_read, file.path),
            file.executable,
        )
        for file in files
    ]
    fetched = _fetch(packages)
    check_size(
        {**{file.name: _size(file) for file in files}, **{name: len(content) for name, content in fetched.items()}}
    )
    members += [Member(f"{PACKAGES}/{name}", _value(content)) for name, content in fetched.items()]
    digest, path = write_archive(members, home.absolute() / "packages")
    warnings = [
        *_warnings(files, collected.ignored if collected else ()),
        *requirements.dropped([name for name in lists if lists[name] != kept[name]]),
    ]
    return Snapshot(digest, path, _files(path), tuple(warnings))


def stored(digest: str, home: Path) -> Snapshot:
    """Return the snapshot with a digest, without its warnings.

    Raises:
        PackageError: it doesn't exist.
    """
    path = home.absolute() / "packages" / f"{digest}.tar"
    if not digest.isalnum() or not path.is_file():
        raise PackageError(f"{path}: the job's package was deleted. Submit the job again.")
    return Snapshot(digest, path, _files(path))


def _files(path: Path) -> tuple[tuple[str, int], ...]:
    with tarfile.open(path) as tar:
        return tuple((member.name, member.size) for member in tar)


def write_archive(members: Sequence[Member], home: Path) -> tuple[str, Path]:
    """Write an archive into a folder, named by its digest. Returns digest and path."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=home, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as out:
            digest = archive.write(members, out)
            out.flush()
            os.fsync(out.fileno())
        path = home / f"{digest}.tar"
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    return digest, path


def _fetch(packages: Sequence[str]) -> dict[str, bytes]:
    """Read the distributions, by the names of their files."""
    fetched: dict[str, bytes] = {}
    for uri in packages:
        name = PurePosixPath(uri).name
        if not name.endswith(DISTRIBUTIONS) or name.startswith(("-", ".")):
            raise PackageError(
                f"--packages {uri}: expected a wheel or a source distribution: {', '.join(DISTRIBUTIONS)}."
            )
        content = _read_uri(uri)
        if fetched.get(name, content) != content:
            raise PackageError(f"--packages {uri}: two different packages have the name {name}. Keep one of them.")
        fetched[name] = content
    return fetched


def _read_uri(uri: str) -> bytes:
    if "://" not in uri:
        return _read(Path(uri).expanduser())
    from footplate.data.remote.location import locate

    location = locate(uri)
    try:
        with location.filesystem.open_input_file(location.path) as file:
            return file.read()
    except OSError as error:
        raise PackageError(f"--packages {uri} can't be read: {error}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PackageError(f"{path} can't be read: {error.strerror}.") from None


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(secrets.LOOKED_AT)


def _value(content: bytes) -> Callable[[], bytes]:
    return lambda: content


def _size(file: Found) -> int:
    return file.path.stat().st_size


def check_size(sizes: dict[str, int]) -> None:
    """Raise if a package is too large.

    Args:
        sizes: the size of each of its files, in bytes.

    Raises:
        PackageError: it is too large.
    """
    total = sum(sizes.values())
    if total <= MAX_BYTES:
        return
    biggest = sorted(sizes, key=lambda name: -sizes[name])[:_SHOWN]
    listed = ", ".join(f"{name} ({sizes[name] / 2**20:.1f} MiB)" for name in biggest)
    raise PackageError(
        f"The package has {total / 2**20:.0f} MiB in {len(sizes)} files; at most {MAX_BYTES // 2**20} MiB can be sent. "
        f"The biggest: {listed}. Keep data elsewhere, such as in a table or a bucket, or name it in .gitignore."
    )


def _warnings(files: Sequence[Found], ignored: Sequence[str]) -> Iterator[str]:
    suspects = [file.name for file in files if secrets.looks_secret(file.name, _head(file.path))]
    if suspects:
        yield (
            f"These files seem to contain secrets: {_some(suspects)}. They are kept with the job. If you don't want that, "
            "name them in .gitignore, or move them out of the package."
        )
    if ignored:
        yield f".gitignore excludes from the package: {_some(ignored)}."


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
