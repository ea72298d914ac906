"""Statistics of a table's columns: nulls, least, greatest and mean values, and the number of rows of each class.

All rows are read if there are at most `MOST_ROWS`. Of a larger table, row groups at equal distances are read, and the
statistics say so. Columns of bytes, such as images, are never read as a whole: their first rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.types as pt

from footplate.data.table import Table
from footplate.reporting.pictures import is_picture

# Arrow makes its functions at run time, so type checkers don't know them.
pc: Any = pyarrow.compute

MOST_ROWS = 100_000
MOST_COLUMNS = 100
MOST_CLASSES = 50
FIRST_ROWS = 32
BINS = 30


@dataclass(frozen=True)
class Column:
    """Statistics of a column, in the rows that were read.

    Attributes:
        name: its name.
        kind: its type.
        nulls: the number of nulls; None if it isn't known.
        least: its least value; None if it has no order, or no value.
        greatest: its greatest value.
        mean: its mean, of numbers only.
        not_finite: values that are NaN or infinite.
        distinct: different values; None if they weren't counted.
        classes: values with their numbers of rows, the most frequent first, if there are at most `MOST_CLASSES`.
        bins: edges (one more) and counts of a histogram, of numbers with more values; empty for other columns.
        note: what else is known.
        picture: the first value, if it is an encoded image.
    """

    name: str
    kind: str
    nulls: int | None = None
    least: Any = None
    greatest: Any = None
    mean: float | None = None
    not_finite: int = 0
    distinct: int | None = None
    classes: Sequence[tuple[Any, int]] = ()
    bins: tuple[Sequence[float], Sequence[int]] = ((), ())
    note: str = ""
    picture: bytes | None = None


@dataclass(frozen=True)
class TableStatistics:
    """Statistics of a table.

    Attributes:
        use: "train", "val" or another use.
        uri: the table as the run named it.
        kind: the kind of source.
        version: the Delta version, or a hash of the content.
        num_rows: the selected rows.
        num_files: its files.
        read: the rows that were read for the statistics.
        columns: its columns, at most `MOST_COLUMNS`.
        more: the number of columns that are left out.
    """

    use: str
    uri: str
    kind: str
    version: int | str
    num_rows: int
    num_files: int
    read: int
    columns: tuple[Column, ...]
    more: int = 0


def statistics_of(use: str, table: Table) -> TableStatistics:
    """Read a table, or a sample of it.

    Raises:
        Exception: the table can't be read.
    """
    names = table.columns[:MOST_COLUMNS]
    large = [name for name in names if _is_large(table.schema.field(name).type)]
    small = [name for name in names if name not in large]
    rows = _sample(table, small)
    first = table.select(large).head(FIRST_ROWS) if large else None
    columns = [
        _of_bytes(table, name, first.column(name))
        if first is not None and name in large
        else column_of(name, rows.column(name))
        for name in names
    ]
    return TableStatistics(
        use, table.uri, table.kind, table.version, table.num_rows, len(table.files), rows.num_rows if small else
        (first.num_rows if first is not None else 0), tuple(columns), len(table.columns) - len(names),
    )  # fmt: skip


def column_of(name: str, values: pa.ChunkedArray) -> Column:
    """Compute the statistics of a column's values."""
    kind, nulls = str(values.type), values.null_count
    present = values.drop_null()
    if pt.is_dictionary(present.type):
        present = present.cast(present.type.value_type)
    if not len(present):
        return Column(name, kind, nulls)
    if pt.is_boolean(present.type) or pt.is_string(present.type) or pt.is_large_string(present.type):
        return _of_words(name, kind, nulls, present)
    if pt.is_integer(present.type) or pt.is_floating(present.type) or pt.is_decimal(present.type):
        return _of_numbers(name, kind, nulls, present)
    if pt.is_temporal(present.type) and not pt.is_duration(present.type):
        ends = pc.min_max(present)
        return Column(name, kind, nulls, str(ends["min"].as_py()), str(ends["max"].as_py()))
    return Column(name, kind, nulls, note=_lengths(present))


def _of_words(name: str, kind: str, nulls: int, present: pa.ChunkedArray) -> Column:
    counts, distinct = _classes(present)
    lengths = "" if pt.is_boolean(present.type) else _between(pc.utf8_length(present), "character")
    return Column(name, kind, nulls, distinct=distinct, classes=counts, note=lengths)


def _of_numbers(name: str, kind: str, nulls: int, present: pa.ChunkedArray) -> Column:
    is_integer = pt.is_integer(present.type)
    numbers = present.cast(pa.float64()).to_numpy() if not is_integer else present.to_numpy()
    finite = numbers if is_integer else numbers[np.isfinite(numbers)]
    counts, distinct = _classes(present) if is_integer else ((), None)
    if not len(finite):
        return Column(name, kind, nulls, not_finite=len(numbers))
    least, greatest = finite.min().item(), finite.max().item()
    # The sum of values near the largest float would overflow.
    mean = float(np.mean(finite / len(finite)) * len(finite)) if not is_integer else float(finite.mean())
    bins: tuple[Sequence[float], Sequence[int]] = ((), ())
    if not counts and np.isfinite(float(greatest) - float(least)):
        heights, edges = np.histogram(finite.astype(np.float64), BINS)
        bins = (edges.tolist(), heights.tolist())
    return Column(
        name, kind, nulls, least, greatest, mean, len(numbers) - len(finite), distinct, counts, bins
    )  # fmt: skip


def _of_bytes(table: Table, name: str, first: pa.ChunkedArray) -> Column:
    field = table.schema.field(name)
    present = [value for value in first.drop_null().to_pylist() if isinstance(value, bytes)]
    sizes = [len(value) for value in present]
    note = f"{min(sizes):,} to {max(sizes):,} bytes in the first {len(first):,} rows" if sizes else ""
    picture = present[0] if present and is_picture(present[0]) else None
    return Column(
        name, str(field.type), table.nulls(name), note=f"images, {note}" if picture else note, picture=picture
    )


def _classes(present: pa.ChunkedArray) -> tuple[tuple[tuple[Any, int], ...], int]:
    counts = pc.value_counts(present)
    if len(counts) > MOST_CLASSES:
        return (), len(counts)
    pairs = [(pair["values"], pair["counts"]) for pair in counts.to_pylist()]
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], str(pair[0])))), len(pairs)


def _lengths(present: pa.ChunkedArray) -> str:
    if pt.is_list(present.type) or pt.is_large_list(present.type):
        return _between(pc.list_value_length(present), "item")
    return ""


def _between(lengths: Any, noun: str) -> str:
    ends = pc.min_max(lengths)
    return f"{ends['min'].as_py():,} to {ends['max'].as_py():,} {noun}s"


def _sample(table: Table, columns: Sequence[str]) -> pa.Table:
    """Read all rows, or row groups at equal distances with at least `MOST_ROWS` rows, of some columns."""
    if not columns:
        return pa.table({})
    selected = table.select(columns)
    groups = [number for number, group in enumerate(selected.row_groups) if group.num_rows]
    if table.num_rows > MOST_ROWS and groups:
        wanted = max(1, -(-MOST_ROWS * len(groups) // table.num_rows))
        groups = [groups[int(index)] for index in np.linspace(0, len(groups) - 1, wanted)]
    pieces: list[pa.Table] = [pa.Table.from_batches([], selected.schema)]
    for group in dict.fromkeys(groups):
        pieces.append(selected.read_group(group).slice(0, MOST_ROWS))
    return pa.concat_tables(pieces)


def _is_large(kind: pa.DataType) -> bool:
    return pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind)
