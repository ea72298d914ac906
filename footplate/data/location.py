"""Where a table lies: a path or a URI, as pyarrow and as delta-rs want it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

import pyarrow.fs as pafs

from footplate.errors import DataError


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


def locate(source: str | os.PathLike[str], options: dict[str, str] | None = None) -> Location:
    """The place that a path or URI means.

    Raises:
        DataError: a scheme that is not known.
    """
    uri = os.fspath(source)
    scheme = urlparse(uri).scheme if "://" in uri else ""
    if scheme in ("", "file"):
        local = unquote(urlparse(uri).path) if scheme else uri
        path = str(Path(local).expanduser().absolute())
        return Location(uri, pafs.LocalFileSystem(), path, path)
    raise DataError(f"{uri}: unknown scheme {scheme}://. Expected a path or file://.")
