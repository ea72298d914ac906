"""What the rows of a table become: one kind for each column, chosen by type, and by a look at the first rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from footplate.core.errors import ConfigError, DataError
from footplate.data.pipeline import row_transform
from footplate.data.pipeline.columns import columns_for
from footplate.data.pipeline.images import BadImage, ImageFormat, ImageMode, choose_format, decode, looks_like_image
from footplate.data.pipeline.windows import Content, null_error
from footplate.data.sources.column_types import is_bytes, is_float
from footplate.data.table import Table

_ROWS_TO_LOOK_AT = 16


@dataclass(frozen=True)
class Recipe:
    """How the rows of a table become a batch.

    Attributes:
        content: what is read.
        formats: what the images of each image column become.
        shapes: (channels, height, width) that they have then; of the first one, where they keep their size.
        transform: the user's function of a row, or None.
        seed: of the generators that the transform is handed.
    """

    content: Content
    formats: dict[str, ImageFormat]
    shapes: dict[str, tuple[int, int, int]]
    transform: row_transform.Transform | None
    seed: int


def make_recipe(
    table: Table,
    size: tuple[int, int] | None,
    mode: ImageMode,
    transform: row_transform.Transform | None,
    skip: bool,
    seed: int,
) -> Recipe:
    """Look at the columns' types and the first rows, and decide what each column becomes.

    Args:
        table: the rows.
        size: (height, width) of images, or None to leave them as they are.
        mode: channels of images.
        transform: the user's function of a row.
        skip: whether bad rows are left out rather than an error.
        seed: of the row generators.

    Raises:
        DataError: a column that has no place in a batch, nulls that mean nothing, images that can't be decoded.
    """
    binary = [field.name for field in table.schema if is_bytes(field.type) or _is_image_struct(field.type)]
    if mode not in ("auto", "L", "RGB", "bytes"):
        raise ConfigError(f'image_mode={mode!r}: expected "auto", "L" (grey), "RGB", or "bytes" (not decoded).')
    examples = _examples(table, binary) if binary and mode != "bytes" else {}
    columns = columns_for(field for field in table.schema if field.name not in examples)
    for names in (kind.names for kind in columns if not skip and not kind.nulls_mean_something):
        for name in names:
            if not is_float(table.schema.field(name).type) and table.nulls(name):
                raise null_error(name, f"{table.nulls(name)} rows of {table.uri}")
    if size is not None and not examples:
        raise DataError(
            f"image_size={size}: none of the columns {', '.join(table.columns)} holds images (JPEG, PNG, WebP, …)."
        )
    formats = {}
    shapes = {}
    for name, example in examples.items():
        formats[name] = choose_format(example, mode, size)
        height, width = decode(example, formats[name]).shape[:2]
        shapes[name] = formats[name].channels, height, width
    return Recipe(Content(columns, tuple(examples), skip), formats, shapes, transform, seed)


def _examples(table: Table, binary: list[str]) -> dict[str, np.ndarray]:
    """For each binary column that holds images: the first that can be decoded.

    Raises:
        DataError: none of the first rows' images can be.
    """
    head = table.select(binary).head(_ROWS_TO_LOOK_AT)
    pa.default_memory_pool().release_unused()  # the pages that hold the first rows may be large
    found = {}
    for name in binary:
        values = [value.get("bytes") if isinstance(value, dict) else value for value in head.column(name).to_pylist()]
        images = [np.frombuffer(value, np.uint8) for value in values if value and looks_like_image(value)]
        for image in images:
            try:
                choose_format(image, "auto", None)
            except BadImage:
                continue
            found[name] = image
            break
        if images and name not in found:
            raise DataError(f"{table.uri}: none of the first {len(images)} images in column {name!r} can be decoded.")
    return found


def _is_image_struct(kind: Any) -> bool:
    """`{bytes, path}`, as Hugging Face data sets keep images."""
    return pt.is_struct(kind) and kind.get_field_index("bytes") >= 0 and pt.is_binary(kind.field("bytes").type)
