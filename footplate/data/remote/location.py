"""Where a table lies: a path or a URI, as pyarrow and as delta-rs want it, and which files there are.

    data/flowers, file:///data/flowers      this machine
    s3://bucket/flowers                     S3 and what speaks its protocol: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …
    gs://bucket/flowers                     Google Cloud Storage: GOOGLE_APPLICATION_CREDENTIALS, STORAGE_EMULATOR_HOST

Credentials come from the environment, by the names that these services' own tools use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.fs as pafs

from footplate.core.errors import DataError
from footplate.data.remote.file_cache import FileCache
from footplate.data.remote.filesystem import identify, wrap

_IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True)
class Location:
    """A place for both libraries.

    Attributes:
        uri: as the user named it, for messages.
        filesystem: pyarrow's, on which the place is `path`.
        path: the place within `filesystem`.
        delta_uri: the place for delta-rs.
        options: delta-rs storage options.
    """

    uri: str
    filesystem: pafs.FileSystem
    path: str
    delta_uri: str
    options: dict[str, str] | None = None


@dataclass(frozen=True)
class FoundFile:
    """A file of a table.

    Attributes:
        path: within the file system.
        relative: its path from the table's directory.
        nbytes: its size.
        changed: when it was changed last, nanoseconds since 1970.
    """

    path: str
    relative: str
    nbytes: int
    changed: int

    @property
    def stamp(self) -> Stamp:
        """What it is known by."""
        return Stamp(self.nbytes, self.changed)


@dataclass(frozen=True)
class Stamp:
    """What tells a file from another one that was put into its place.

    Attributes:
        nbytes: its size.
        changed: when it was changed last, nanoseconds since 1970; 0 where there is a tag.
        tag: what an object store calls its content (an ETag or a generation); empty for a local file.
    """

    nbytes: int
    changed: int
    tag: str = ""

    @classmethod
    def of(cls, filesystem: pafs.FileSystem, path: str) -> Stamp:
        """The stamp that a file has now."""
        known = identify(filesystem, path)
        if known is not None:
            return cls(known.size, 0, known.tag)
        info = filesystem.get_file_info(path)
        return cls(info.size or 0, info.mtime_ns or 0)

    def check(self, filesystem: pafs.FileSystem, path: str) -> None:
        """Make sure that a local file still is the one that it was; a remote file system does so by itself.

        Raises:
            FileNotFoundError: it is gone, or another one has taken its place.
        """
        if filesystem.type_name == "local" and Stamp.of(filesystem, path) != self:
            raise FileNotFoundError(f"{path} was replaced by another file, or removed")


def locate(
    source: str | os.PathLike[str], environ: Mapping[str, str] = os.environ, cache: FileCache | None = None
) -> Location:
    """The place that a path or URI means.

    Args:
        source: the path or URI.
        environ: where addresses and credentials are.
        cache: keeps what is read of it, if it is remote.

    Raises:
        DataError: a scheme that is not known, a user who is not there, or a cache that can't be used.
    """
    uri = os.fspath(source)
    parsed = urlparse(uri)
    scheme = parsed.scheme if "://" in uri else ""
    if scheme in ("", "file"):
        try:
            path = str(Path(unquote(parsed.path) if scheme else uri).expanduser().absolute())
        except RuntimeError:
            raise DataError(f"{uri}: there is no such user here. Give the path of the table.") from None
        return Location(uri, pafs.LocalFileSystem(), path, path)
    path = f"{parsed.netloc}{unquote(parsed.path)}".rstrip("/")
    if scheme in ("s3", "s3a"):
        endpoint = _s3_endpoint(environ)
        options = {"AWS_ENDPOINT_URL": endpoint} if endpoint else {}
        if endpoint and endpoint.startswith("http://"):
            options["AWS_ALLOW_HTTP"] = "true"
        return Location(uri, wrap(connect(scheme, environ), cache, endpoint or ""), path, f"s3://{path}", options)
    if scheme in ("gs", "gcs"):
        service = environ.get("STORAGE_EMULATOR_HOST", "")
        return Location(uri, wrap(connect(scheme, environ), cache, service), path, f"gs://{path}")
    raise DataError(f"{uri}: unknown scheme {scheme}://. Expected a path, file://, s3:// or gs://.")


def connect(scheme: str, environ: Mapping[str, str], attempts: int = 1) -> pafs.FileSystem:
    """The bare file system of an object store.

    Args:
        scheme: of its URIs: s3, s3a, gs, gcs.
        environ: where addresses and credentials are.
        attempts: how often a request is made, by pyarrow itself, before it fails.
    """
    if scheme in ("s3", "s3a"):
        return _s3(_s3_endpoint(environ), environ, attempts)
    return _gcs(environ.get("STORAGE_EMULATOR_HOST"), timedelta(seconds=2 * attempts))


def exists(place: Location, path: str) -> pafs.FileType:
    """What lies at a path of the place's file system.

    Raises:
        DataError: the service can't be reached, or doesn't let us in.
    """
    try:
        return place.filesystem.get_file_info(path).type
    except (OSError, pa.ArrowException) as error:
        raise unreachable(place, error) from error


def is_image(path: str) -> bool:
    """Whether a file is an image, by its ending."""
    return path.lower().endswith(_IMAGE_ENDINGS)


def find_files(place: Location) -> list[FoundFile]:
    """All files of a place (a file, a directory or a glob), hidden ones left out, in the order of their paths.

    Raises:
        DataError: the service can't be reached, or there is a Delta table somewhere below.
    """
    path = place.path
    mark = re.search(r"[*?\[]", path)
    kind = exists(place, path)
    if kind != pafs.FileType.NotFound:
        mark = None  # it is a name
    if kind == pafs.FileType.File:
        return [_found(place.filesystem.get_file_info(path), path.rpartition("/")[0])]
    base = path[: mark.start()].rpartition("/")[0] or "/" if mark else path.rstrip("/")
    try:
        infos = place.filesystem.get_file_info(pafs.FileSelector(base, recursive=True, allow_not_found=True))
    except (OSError, pa.ArrowException) as error:
        raise unreachable(place, error) from error
    files = [_found(info, base) for info in infos if info.type == pafs.FileType.File]
    if mark is None or not re.search(r"/[._]", path[len(base) :]):
        files = [file for file in files if not _is_hidden(file.relative)]
    pattern = re.compile(_glob_to_regex(path)) if mark else None
    chosen = [file for file in files if pattern is None or pattern.fullmatch(file.path)]
    tables = {info.path.partition("/_delta_log")[0] for info in infos if "/_delta_log" in info.path[len(base) :]}
    for table in sorted(tables):
        if mark is None or any(file.path.startswith(f"{table}/") for file in chosen):
            raise DataError(f"{place.uri}: there is a Delta table in it, {table}: read that.")
    return sorted(chosen, key=lambda file: file.path)


def unreachable(place: Location, error: Exception) -> DataError:
    """The error for a place that can't be asked what it holds."""
    return DataError(
        f"{place.uri}: can't be reached ({error}). Check the address, and the credentials: s3:// takes AWS_ACCESS_KEY_ID "
        "and its like, AWS_REGION and AWS_ENDPOINT_URL; gs:// takes GOOGLE_APPLICATION_CREDENTIALS."
    )


def _found(info: pafs.FileInfo, base: str) -> FoundFile:
    return FoundFile(info.path, info.path[len(base) :].lstrip("/"), info.size, info.mtime_ns or 0)


def _is_hidden(relative: str) -> bool:
    """As Spark sees it; but images may lie in a directory `_background`, which is a class like any other."""
    marks = (".",) if is_image(relative) else (".", "_")
    return any(part.startswith(marks) and "=" not in part for part in relative.split("/"))


def _glob_to_regex(pattern: str) -> str:
    """`**/` is any number of directories, also none."""
    parts = {"/**/": "/(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(/\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return "".join(parts.get(piece) or (_one_of(piece) if piece[:1] == "[" else re.escape(piece)) for piece in pieces)


def _one_of(characters: str) -> str:
    inner = characters[1:-1].replace("\\", "\\\\")
    return f"[^/{inner[1:]}]" if inner.startswith("!") else f"[{inner}]".replace("[^", "[\\^")


def _s3_endpoint(environ: Mapping[str, str]) -> str | None:
    return environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")


def _s3(endpoint: str | None, environ: Mapping[str, str], attempts: int) -> pafs.FileSystem:
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    retries = pafs.AwsStandardS3RetryStrategy(
        max_attempts=attempts
    )  # tables have their own: footplate.data.remote.filesystem
    if endpoint:
        parsed = urlparse(endpoint)
        return pafs.S3FileSystem(
            endpoint_override=parsed.netloc, scheme=parsed.scheme, region=region, retry_strategy=retries
        )
    return pafs.S3FileSystem(region=region, retry_strategy=retries)


def _gcs(emulator: str | None, patience: timedelta) -> pafs.FileSystem:
    if emulator:
        parsed = urlparse(emulator if "://" in emulator else f"http://{emulator}")
        return pafs.GcsFileSystem(
            anonymous=True, scheme=parsed.scheme, endpoint_override=parsed.netloc, retry_time_limit=patience
        )
    return pafs.GcsFileSystem(retry_time_limit=patience)
