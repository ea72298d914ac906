"""TFRecord files as a source, without TensorFlow.

A TFRecord file is a chain of records: length (8 bytes), its checksum (4), the data, its checksum (4). Opening walks
along the lengths and verifies their checksums. It doesn't verify the checksums of the data, but collects them: the
content hash is made of them.

A record is a `tf.train.Example`: a map of feature names to lists of bytes, floats or int64s. A feature that has one
value in the first records is a column of single values. A feature that has several is a column of lists. A feature that
a record doesn't have is null there. If the records are no Examples, there is one column of bytes, `record`.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from footplate.core.errors import DataError
from footplate.core.hashing import hashed
from footplate.data.remote.location import FoundFile, Location
from footplate.data.sources.base import RowGroup, WholeGroupSource
from footplate.data.sources.tf_example import Feature, parse_example

_GROUP_BYTES = 4 * 2**20
_EXAMPLE_ROWS = 16
_ROWS_PER_PIECE = 32
_CHUNK = 2**20


class TFRecordSource(WholeGroupSource):
    """Records of TFRecord files, in groups of a few MiB of neighbouring records.

    Args:
        uri: the table as the user named it.
        files: the files, in order.
        filesystem: the file system that they are on.

    Raises:
        DataError: a file is damaged or compressed.
    """

    in_memory = False
    kind = "tfrecord"
    written = ""

    def __init__(self, uri: str, files: Sequence[FoundFile], filesystem: pafs.FileSystem) -> None:
        self.uri = uri
        self._files = list(files)
        self._filesystem = filesystem
        # For each group: the number of its file, and where the data of each record and of the next one begins.
        self._groups: list[tuple[int, np.ndarray]] = []
        contents = []
        for number, file in enumerate(self._files):
            offsets, checksums = self._walk(file)
            self._groups += [(number, part) for part in _cut(offsets)]
            contents.append((file.relative, offsets, checksums))
        self.content = hashed(contents)
        self.version = self.content[:16]

    @property
    def is_remote(self) -> bool:
        """True if the files are read over a network."""
        return self._filesystem.type_name != "local"

    @property
    def files(self) -> list[str]:
        """Paths of the files, in order."""
        return [file.path for file in self._files]

    @functools.cached_property
    def schema(self) -> pa.Schema:
        """The features of the first records, in the order of their names."""
        records = self._records(0, 0, _EXAMPLE_ROWS) if self._groups else []
        examples = [parse_example(record) for record in records]
        if not examples or None in examples:
            return pa.schema([("record", pa.binary())])
        # By feature: its type, and the largest number of values in one record.
        features: dict[str, tuple[pa.DataType, int]] = {}
        for example in examples:
            for name, (kind, values) in (example or {}).items():
                known, most = features.get(name, (kind, 0))
                features[name] = kind if values else known, max(len(values), most)
        return pa.schema(
            [(name, kind if most <= 1 else pa.list_(kind)) for name, (kind, most) in sorted(features.items())]
        )

    def groups(self, columns: Sequence[str] | None = None) -> list[RowGroup]:
        """List the groups of neighbouring records. The index of a group counts within its file."""
        counts: dict[int, int] = {}
        row_groups = []
        for number, offsets in self._groups:
            index = counts.get(number, 0)
            counts[number] = index + 1
            nbytes = int(offsets[-1] - offsets[0])
            row_groups.append(RowGroup(self._files[number].path, index, len(offsets) - 1, nbytes))
        return row_groups

    def kept(self, group: int) -> None:
        """Return None: no record is deleted."""

    def nulls(self, column: str) -> int | None:
        """Return 0 for whole records, None for features."""
        return 0 if column == "record" else None

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Read and parse the records of a group."""
        return self._read(group, 0, len(self._groups[group][1]) - 1, columns)

    def stream(self, group: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Read and parse a few records at a time."""
        rows = len(self._groups[group][1]) - 1
        for start in range(0, rows, _ROWS_PER_PIECE):
            yield self._read(group, start, min(start + _ROWS_PER_PIECE, rows), columns)

    def _read(self, group: int, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        records = self._records(group, start, stop)
        fields = [self.schema.field(name) for name in columns]
        if self.schema.names == ["record"]:
            return pa.Table.from_arrays([pa.array(records, field.type) for field in fields], schema=pa.schema(fields))

        path = self._files[self._groups[group][0]].path
        rows: list[list[Any]] = [[] for _ in fields]
        for number, record in enumerate(records, start):
            example = parse_example(record)
            if example is None:
                raise DataError(
                    f"{path}, record {number} of part {group} is no tf.train.Example, but the first records are. "
                    "Write the file again with records of one kind."
                )
            for values, field in zip(rows, fields, strict=True):
                values.append(_value(example.get(field.name), field, path))

        arrays = [pa.array(values, field.type) for values, field in zip(rows, fields, strict=True)]
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields))

    def _walk(self, file: FoundFile) -> tuple[np.ndarray, bytes]:
        """Return where each record's data begins (and the next record's would), int64, and the checksums of all data."""
        starts, checksums, at = [], [], 0
        with self._filesystem.open_input_file(file.path) as handle:
            chunk, base = b"", 0
            while at < file.nbytes:
                # The checksum of the previous record's data is right before this record.
                before = max(0, at - 4)
                if before < base or at + 12 > base + len(chunk):
                    chunk, base = handle.read_at(min(_CHUNK, file.nbytes - before), before), before

                head = chunk[at - base : at - base + 12]
                if head[:2] == b"\x1f\x8b" and at == 0:
                    raise DataError(f"{file.path}: compressed TFRecord files can't be read. Write them uncompressed.")
                if len(head) < 12 or _masked_crc(head[:8]) != struct.unpack("<I", head[8:])[0]:
                    raise DataError(
                        f"{file.path}: damaged at byte {at} (a record's length has a wrong checksum). "
                        "Write the file again, or leave it out."
                    )
                checksums.append(chunk[before - base : at - base])
                starts.append(at + 12)
                at += 12 + struct.unpack("<Q", head[:8])[0] + 4
            if at != file.nbytes:
                raise DataError(
                    f"{file.path}: truncated: its last record ends at byte {at}, the file at {file.nbytes}. Write it "
                    "again, or leave it out."
                )
            checksums.append(handle.read_at(4, at - 4) if at else b"")
        return np.array([*starts, at + 12], dtype=np.int64), b"".join(checksums)

    def _records(self, group: int, start: int, stop: int) -> list[bytes]:
        number, offsets = self._groups[group]
        offsets = offsets[start : stop + 1]
        path = self._files[number].path
        try:
            with (
                self._files[number].stamp.unchanged(self._filesystem, path),
                self._filesystem.open_input_file(path) as handle,
            ):
                data = handle.read_at(int(offsets[-1] - offsets[0]) - 16, int(offsets[0]))
        except OSError as error:
            raise DataError(
                f"{path}: this file of {self.uri} can't be read any more ({error}). "
                "Keep the files as they are while a run reads them."
            ) from error
        local = (offsets - offsets[0]).tolist()
        return [data[start : end - 16] for start, end in itertools.pairwise(local)]


def open_tfrecord(location: Location, files: Sequence[FoundFile]) -> TFRecordSource | None:
    """Return a source of the TFRecord files among some files; None if there is none."""
    records = [file for file in files if ".tfrec" in file.relative.rpartition("/")[2].lower()]
    return TFRecordSource(location.uri, records, location.filesystem) if records else None


def _cut(offsets: np.ndarray) -> Iterator[np.ndarray]:
    """Cut records into groups of about `_GROUP_BYTES`. The offsets of a group end with where the next group begins."""
    start = 0
    while start < len(offsets) - 1:
        stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + _GROUP_BYTES, side="right")) - 1)
        yield offsets[start : stop + 1]
        start = stop


def _value(feature: Feature | None, field: pa.Field, path: str) -> Any:
    if feature is None or not feature[1]:
        return None
    kind = field.type.value_type if pa.types.is_list(field.type) else field.type
    if feature[0] != kind:
        raise DataError(
            f"{path}: feature {field.name!r} holds {feature[0]} in a record, but {kind} in the first. Write the "
            "records again with one type."
        )
    if pa.types.is_list(field.type):
        return feature[1]
    if len(feature[1]) > 1:
        raise DataError(
            f"{path}: feature {field.name!r} has {len(feature[1])} values in a record, but one in the first. Write the "
            "records again."
        )
    return feature[1][0]


@functools.cache
def _crc_table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


def _masked_crc(data: bytes) -> int:
    """Return the CRC-32C, rotated and shifted as in TFRecord files."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
