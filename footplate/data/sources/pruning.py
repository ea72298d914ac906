"""Row groups that a filter can't match, found without reading them.

The footer of a Parquet file states the bounds of each column of each row group, and its nulls. A partition column has
one value for a whole file. Each of these is a *guarantee*: an expression that holds for every row of the group. Arrow
simplifies the filter under each guarantee. If only "false" remains, the row group isn't read.

A float may be NaN, which the footer doesn't mention. `x != 5` and `not (x < 5)` hold for NaN, whatever the bounds. So
the bounds of floats are used only for filters of plain comparisons.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

# Operators and functions in a filter's text that may hold for NaN.
_MAY_KEEP_NAN = re.compile(r"!=|\b(?!is_in\()\w+\(")
_UNITS = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}


def can_match(filter: pc.Expression, schema: pa.Schema, guarantees: Sequence[pc.Expression | None]) -> list[bool]:
    """Return for each guarantee if a row that it holds for can pass the filter."""
    import pyarrow.dataset as ds
    import pyarrow.fs as pafs

    format, filesystem = ds.ParquetFileFormat(), pafs.LocalFileSystem()
    always = pc.scalar(True)
    fragments = [
        format.make_fragment(str(number), filesystem, always if guarantee is None else guarantee)
        for number, guarantee in enumerate(guarantees)
    ]
    dataset = ds.FileSystemDataset(fragments, schema, format, filesystem)
    remaining = {fragment.path for fragment in dataset.get_fragments(filter)}
    return [str(number) in remaining for number in range(len(guarantees))]


def bounds_help(field: pa.Field, filter: pc.Expression) -> bool:
    """Return True if the bounds of a column may be used for this filter."""
    if pt.is_floating(field.type):
        return not _MAY_KEEP_NAN.search(str(filter))
    kind = field.type
    return (
        pt.is_signed_integer(kind)
        or pt.is_boolean(kind)
        or pt.is_date(kind)
        or pt.is_timestamp(kind)
        or pt.is_string(kind)
    )


def known_value(field: pa.Field, value: Any) -> pc.Expression:
    """Return the guarantee that a column has one value, or is null."""
    if value is None:
        return pc.field(field.name).is_null()
    return pc.field(field.name) == pa.scalar(value).cast(field.type)


def bounded(field: pa.Field, chunk: Any, logical_type: Any) -> pc.Expression | None:
    """Return the guarantee that a column chunk's statistics give; None if they give none.

    Args:
        field: the table's column.
        chunk: pyarrow's metadata of the column chunk.
        logical_type: the logical type of the column in the file.
    """
    statistics = chunk.statistics
    if statistics is None:
        return None
    column = pc.field(field.name)
    if statistics.has_null_count and statistics.null_count == chunk.num_values:
        return column.is_null()
    if not statistics.has_min_max:
        return None

    try:
        low, high = (_scalar(field, value, logical_type) for value in _ends(field, statistics))
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, ValueError, OverflowError):
        return None
    within = (column >= low) & (column <= high)
    return within if statistics.has_null_count and not statistics.null_count else within | column.is_null()


def _ends(field: pa.Field, statistics: Any) -> tuple[Any, Any]:
    if pt.is_timestamp(field.type):
        return statistics.min_raw, statistics.max_raw
    return statistics.min, statistics.max


def _scalar(field: pa.Field, value: Any, logical_type: Any) -> pa.Scalar:
    if not pt.is_timestamp(field.type):
        return pa.scalar(value).cast(field.type)
    described = json.loads(logical_type.to_json())
    stored = pa.timestamp(_UNITS[described["timeUnit"]], field.type.tz)
    return pa.scalar(value, pa.int64()).cast(stored).cast(field.type)
