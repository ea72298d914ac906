"""The batch that the rows of a table become: one kind for each column, chosen by its type and by the first rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from footplate.core.errors import ConfigError, DataError
from footplate.data.packing.table import PackedTable
from footplate.data.pipeline.columns import Columns, columns_for
from footplate.data.pipeline.images import BadImage, ImageFormat, ImageMode, choose_format, decode, looks_like_image
from footplate.data.pipeline.packed_columns import PackedColumns
from footplate.data.pipeline.row_transform import Transform
from footplate.data.pipeline.windows import ReadSpec, null_error
from footplate.data.sources.column_types import is_bytes, is_float
from footplate.data.table import Table

_EXAMPLE_ROWS = 16


@dataclass(frozen=True)
class BatchSpec:
    """Specification of the batch that the rows of a table become.

    Attributes:
        read: the columns to read.
        formats: for each image column, the format of its images.
        shapes: for each image column, (channels, height, width) of its images; that of the first image, if images keep
            their size.
        transform: the user's function of a row, or None.
        seed: seed of the generators that the transform gets.
    """

    read: ReadSpec
    formats: dict[str, ImageFormat]
    shapes: dict[str, tuple[int, int, int]]
    transform: Transform | None
    seed: int


def make_batch_spec(
    table: Table,
    size: tuple[int, int] | None,
    mode: ImageMode,
    transform: Transform | None,
    skip: bool,
    seed: int,
) -> BatchSpec:
    """Choose what each column becomes, from the columns' types and the first rows.

    Args:
        table: the rows.
        size: (height, width) of images, or None to leave them as they are.
        mode: channels of images.
        transform: the user's function of a row.
        skip: True to leave bad rows out; False to raise an error.
        seed: seed of the row generators.

    Raises:
        DataError: a column of an unsupported type, nulls without a meaning, or images that can't be decoded.
    """
    binary = [field.name for field in table.schema if is_bytes(field.type) or _is_image_struct(field.type)]
    if mode not in ("auto", "L", "RGB", "bytes"):
        raise ConfigError(f'image_mode={mode!r}: expected "auto", "L" (grey), "RGB", or "bytes" (not decoded).')
    examples = _example_images(table, binary) if binary and mode != "bytes" else {}

    # The footers may already tell of nulls that would fail later.
    if isinstance(table, PackedTable):
        columns: tuple[Columns, ...] = (PackedColumns(tuple(table.columns), table.packing),)
    else:
        columns = columns_for(field for field in table.schema if field.name not in examples)
    for names in (kind.names for kind in columns if not skip and not kind.keeps_nulls):
        for name in names:
            if not is_float(table.schema.field(name).type) and table.nulls(name):
                raise null_error(name, f"{table.nulls(name)} rows of {table.uri}")
    if size is not None and not examples:
        raise DataError(
            f"image_size={size}: none of the columns {', '.join(table.columns)} holds images (JPEG, PNG, WebP, …). Leave "
            "image_size= out, or add the image column to columns=."
        )

    formats = {}
    shapes = {}
    for name, example in examples.items():
        formats[name] = choose_format(example, mode, size)
        height, width = decode(example, formats[name]).shape[:2]
        shapes[name] = formats[name].channels, height, width
    return BatchSpec(ReadSpec(columns, tuple(examples), skip), formats, shapes, transform, seed)


def _example_images(table: Table, binary: list[str]) -> dict[str, np.ndarray]:
    """Return the first image that can be decoded, for each binary column that holds images.

    Raises:
        DataError: none of the first rows' images can be decoded.
    """
    head = table.select(binary).head(_EXAMPLE_ROWS)
    # The pages that hold the first rows may be large.
    pa.default_memory_pool().release_unused()

    examples = {}
    for name in binary:
        values = [value.get("bytes") if isinstance(value, dict) else value for value in head.column(name).to_pylist()]
        images = [np.frombuffer(value, np.uint8) for value in values if value and looks_like_image(value)]
        for image in images:
            try:
                choose_format(image, "auto", None)
            except BadImage:
                continue
            examples[name] = image
            break
        if images and name not in examples:
            raise DataError(
                f"{table.uri}: none of the first {len(images)} images in column {name!r} can be decoded. Repair the "
                'images, or pass image_mode="bytes" to get them encoded.'
            )
    return examples


def _is_image_struct(kind: Any) -> bool:
    """Return True for `{bytes, path}`, the type in which Hugging Face data sets keep images."""
    return pt.is_struct(kind) and kind.get_field_index("bytes") >= 0 and pt.is_binary(kind.field("bytes").type)
