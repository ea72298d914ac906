"""The location of a table: a path or URI for pyarrow and for delta-rs, and its files.

data/flowers, file:///data/flowers      this machine
s3://bucket/flowers                     an object store (`services.py`)
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.fs as pafs

from footplate.core.errors import DataError
from footplate.data.remote.file_cache import FileCache
from footplate.data.remote.filesystem import identify, wrap
from footplate.data.remote.services import SCHEMES, connect, credentials_of, endpoint, for_delta, parse

_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True)
class Location:
    """A location for pyarrow and for delta-rs.

    Attributes:
        uri: the location as the user named it, for messages.
        filesystem: pyarrow's file system.
        path: the path within `filesystem`.
        delta_uri: the path or URI for delta-rs; None if it can't read there.
        options: delta-rs storage options.
    """

    uri: str
    filesystem: pafs.FileSystem
    path: str
    delta_uri: str | None
    options: dict[str, str] | None = None


@dataclass(frozen=True)
class FoundFile:
    """A file of a table.

    Attributes:
        path: the path within the file system.
        relative: the path from the table's directory.
        nbytes: the size.
        changed: when it was last changed, in nanoseconds since 1970.
    """

    path: str
    relative: str
    nbytes: int
    changed: int

    @property
    def stamp(self) -> Stamp:
        """The file's stamp, from the listing."""
        return Stamp(self.nbytes, self.changed)


@dataclass(frozen=True)
class Stamp:
    """A stamp that differs if another file has replaced a file.

    Attributes:
        nbytes: the size.
        changed: when it was last changed, in nanoseconds since 1970; 0 if there is a tag.
        tag: the object store's tag of the content (an ETag or a generation); empty for a local file.
    """

    nbytes: int
    changed: int
    tag: str = ""

    @classmethod
    def of(cls, filesystem: pafs.FileSystem, path: str) -> Stamp:
        """Read the stamp of a file."""
        identity = identify(filesystem, path)
        if identity is not None:
            return cls(identity.size, 0, identity.tag)
        info = filesystem.get_file_info(path)
        return cls(info.size or 0, info.mtime_ns or 0)

    def check(self, filesystem: pafs.FileSystem, path: str) -> None:
        """Raise if another file has replaced a local file. A remote file system checks this itself.

        Raises:
            FileNotFoundError: the file is gone, or another file has replaced it.
        """
        if filesystem.type_name == "local" and Stamp.of(filesystem, path) != self:
            raise FileNotFoundError(f"{path} was replaced by another file, or removed")

    @contextlib.contextmanager
    def unchanged(self, filesystem: pafs.FileSystem, path: str) -> Iterator[None]:
        """Check a local file before and after a block that reads it.

        A file that is rewritten while the block reads may give wrong values, or bytes that can't be decoded. So the check
        after the block decides, also if the block has failed.

        Raises:
            FileNotFoundError: the file is gone, or another file has replaced it.
        """
        self.check(filesystem, path)
        try:
            yield
        except (pa.ArrowInvalid, OSError):
            self.check(filesystem, path)
            raise
        self.check(filesystem, path)


def locate(
    source: str | os.PathLike[str], environ: Mapping[str, str] = os.environ, cache: FileCache | None = None
) -> Location:
    """Return the location of a path or URI.

    Args:
        source: the path or URI.
        environ: environment variables with addresses and credentials.
        cache: keeps what is read, if the location is remote.

    Raises:
        DataError: an unknown scheme, an incomplete address, an unknown user, or a cache that can't be used.
        MissingExtra: the library of the service isn't installed.
    """
    uri = os.fspath(source)
    address = parse(uri)
    if address is not None:
        address = replace(address, path=unquote(address.path))
        delta_uri, options = for_delta(address, environ)
        filesystem = wrap(connect(address, environ), cache, endpoint(address, environ))
        return Location(uri, filesystem, address.path, delta_uri, options)

    if uri.startswith("dbfs:/"):
        mounted = f"/dbfs/{uri.removeprefix('dbfs:').lstrip('/')}"
        raise DataError(
            f"{uri}: only Databricks knows this address. There, its path is {mounted}; of a volume, it is /Volumes/…. Give "
            "the path, or the address of the object store behind it, such as s3:// or abfss://."
        )

    parsed = urlparse(uri)
    scheme = parsed.scheme if "://" in uri else ""
    if scheme not in ("", "file"):
        raise DataError(f"{uri}: unknown scheme {scheme}://. Expected a path, file://, {SCHEMES}.")
    try:
        path = str(Path(unquote(parsed.path) if scheme else uri).expanduser().absolute())
    except RuntimeError:
        raise DataError(f"{uri}: there is no such user here. Give the full path of the table.") from None
    return Location(uri, pafs.LocalFileSystem(), path, path)


def full_address(uri: str) -> str | None:
    """Return a path or URI that is valid in any working directory; None for the name of a frame, such as "<frame>"."""
    if uri.startswith("<"):
        return None
    return uri if "://" in uri else str(Path(uri).expanduser().absolute())


def exists(location: Location, path: str) -> pafs.FileType:
    """Return the type of a path on the location's file system.

    Raises:
        DataError: the service can't be reached, or refuses access.
    """
    try:
        return location.filesystem.get_file_info(path).type
    except (OSError, pa.ArrowException) as error:
        raise unreachable(location, error) from error


def is_image(path: str) -> bool:
    """Return True if a file is an image, by its suffix."""
    return path.lower().endswith(_IMAGE_SUFFIXES)


def find_files(location: Location) -> list[FoundFile]:
    """List the files of a location (a file, a directory or a glob) in the order of their paths, without hidden files.

    Raises:
        DataError: the service can't be reached, or there is a Delta table in the directory.
    """
    path = location.path
    mark = re.search(r"[*?\[]", path)
    kind = exists(location, path)
    # A file or directory may have these characters in its name.
    if kind != pafs.FileType.NotFound:
        mark = None
    if kind == pafs.FileType.File:
        return [_found_file(location.filesystem.get_file_info(path), path.rpartition("/")[0])]

    base = path[: mark.start()].rpartition("/")[0] or "/" if mark else path.rstrip("/")
    try:
        infos = location.filesystem.get_file_info(pafs.FileSelector(base, recursive=True, allow_not_found=True))
    except (OSError, pa.ArrowException) as error:
        raise unreachable(location, error) from error

    # A glob that names hidden files finds them.
    files = [_found_file(info, base) for info in infos if info.type == pafs.FileType.File]
    if mark is None or not re.search(r"/[._]", path[len(base) :]):
        files = [file for file in files if not _is_hidden(file.relative)]
    pattern = re.compile(_glob_to_regex(path)) if mark else None
    chosen = [file for file in files if pattern is None or pattern.fullmatch(file.path)]

    # The files of a Delta table alone would bring back deleted rows.
    tables = {info.path.partition("/_delta_log")[0] for info in infos if "/_delta_log" in info.path[len(base) :]}
    for table in sorted(tables):
        if mark is None or any(file.path.startswith(f"{table}/") for file in chosen):
            raise DataError(f"{location.uri}: there is a Delta table in it, {table}. Open that table.")
    return sorted(chosen, key=lambda file: file.path)


def unreachable(location: Location, error: Exception) -> DataError:
    """The error for a location that can't be reached."""
    why = str(error).partition("\n")[0]
    return DataError(
        f"{location.uri}: can't be reached ({why}). Check the address and the credentials: "
        f"{credentials_of(parse(location.uri))}."
    )


def _found_file(info: pafs.FileInfo, base: str) -> FoundFile:
    return FoundFile(info.path, info.path[len(base) :].lstrip("/"), info.size, info.mtime_ns or 0)


def _is_hidden(relative: str) -> bool:
    """Return True for a file that Spark ignores. But images may be in a directory `_background`, a class like any other."""
    marks = (".",) if is_image(relative) else (".", "_")
    return any(part.startswith(marks) and "=" not in part for part in relative.split("/"))


def _glob_to_regex(pattern: str) -> str:
    """Convert a glob to a regular expression. `**/` is any number of directories, also none."""
    parts = {"/**/": "/(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(/\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return "".join(
        parts.get(piece) or (_character_class(piece) if piece[:1] == "[" else re.escape(piece)) for piece in pieces
    )


def _character_class(characters: str) -> str:
    inner = characters[1:-1].replace("\\", "\\\\")
    return f"[^/{inner[1:]}]" if inner.startswith("!") else f"[{inner}]".replace("[^", "[\\^")
