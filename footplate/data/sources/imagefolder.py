"""A directory of image files as a source. The directory of a file is its class.

    flowers/daisy/1.jpg         image, label 0, label_name "daisy", path "daisy/1.jpg"
    flowers/rose/7.jpg          image, label 1, label_name "rose",  path "rose/7.jpg"

Classes are numbered in the order of their names. Without class directories there are only `image` and `path`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.fs as pafs

from footplate.core.errors import DataError
from footplate.core.hashing import hashed
from footplate.data.remote.location import FoundFile, Location, is_image
from footplate.data.sources.base import RowGroup, WholeGroupSource

_ROWS_PER_GROUP = 32
_ROWS_PER_PIECE = 8


class ImageFolderSource(WholeGroupSource):
    """Image files, `_ROWS_PER_GROUP` of them at a time.

    Args:
        uri: the table as the user named it.
        files: the image files, in order.
        filesystem: the file system that they are on.
    """

    in_memory = False
    kind = "imagefolder"

    def __init__(self, uri: str, files: Sequence[FoundFile], filesystem: pafs.FileSystem) -> None:
        self.uri = uri
        self._files = list(files)
        self._filesystem = filesystem
        names = [file.relative.rpartition("/")[0] for file in files]
        self._classes = sorted(set(names))
        self.schema = pa.schema([("image", pa.binary()), ("path", pa.string())])
        if self._classes != [""]:
            self.schema = self.schema.insert(1, pa.field("label", pa.int64()))
            self.schema = self.schema.insert(2, pa.field("label_name", pa.string()))
        self.content = hashed([f"{file.nbytes} {file.relative}" for file in files])
        self.written = hashed([file.changed for file in files])
        self.version = hashed(self.content, self.written)[:16]

    @property
    def is_remote(self) -> bool:
        """True if the files are read over a network."""
        return self._filesystem.type_name != "local"

    @property
    def files(self) -> list[str]:
        """Paths of the images, in order."""
        return [file.path for file in self._files]

    def groups(self, columns: Sequence[str] | None = None) -> list[RowGroup]:
        """Group neighbouring files. The index of a group is that of its first file."""
        row_groups = []
        for start in range(0, len(self._files), _ROWS_PER_GROUP):
            part = self._files[start : start + _ROWS_PER_GROUP]
            nbytes = sum(file.nbytes for file in part) if columns is None or "image" in columns else 64 * len(part)
            row_groups.append(RowGroup(part[0].path, start, len(part), nbytes))
        return row_groups

    def kept(self, group: int) -> None:
        """Return None: no file is deleted."""

    def nulls(self, column: str) -> int:
        """Return 0: there are no nulls."""
        return 0

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Read the bytes and classes of a group's files."""
        return self._read(self._files[group * _ROWS_PER_GROUP : (group + 1) * _ROWS_PER_GROUP], columns)

    def stream(self, group: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Read a few files at a time."""
        start = group * _ROWS_PER_GROUP
        stop = min(start + _ROWS_PER_GROUP, len(self._files))
        for first in range(start, stop, _ROWS_PER_PIECE):
            yield self._read(self._files[first : min(first + _ROWS_PER_PIECE, stop)], columns)

    def _read(self, part: Sequence[FoundFile], columns: Sequence[str]) -> pa.Table:
        names = [file.relative.rpartition("/")[0] for file in part]
        values = {
            "image": lambda: [self._bytes(file) for file in part],
            "label": lambda: [self._classes.index(name) for name in names],
            "label_name": lambda: names,
            "path": lambda: [file.relative for file in part],
        }
        fields = [self.schema.field(name) for name in columns]
        return pa.Table.from_arrays(
            [pa.array(values[field.name](), field.type) for field in fields], schema=pa.schema(fields)
        )

    def _bytes(self, file: FoundFile) -> bytes:
        try:
            with (
                file.stamp.unchanged(self._filesystem, file.path),
                self._filesystem.open_input_file(file.path) as handle,
            ):
                return handle.read()
        except OSError as error:
            raise DataError(
                f"{file.path}: this file of {self.uri} can't be read any more ({error}). "
                "Keep the files as they are while a run reads them."
            ) from error


def open_image_folder(location: Location, files: Sequence[FoundFile]) -> ImageFolderSource | None:
    """Return a source of the images among some files; None if there is none."""
    images = [file for file in files if is_image(file.path)]
    return ImageFolderSource(location.uri, images, location.filesystem) if images else None
