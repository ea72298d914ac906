"""The selected rows of a table: filters and splits.

Before the first epoch, a selection becomes one array of positions for each row group. So the number of batches is
known, and is the same on every rank. A split hashes a key, or a row's address (file, row group and number). So a row
stays in its part when the table grows.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from footplate.core.errors import DataError, did_you_mean
from footplate.data.sources.base import RowGroup, Source
from footplate.data.sources.pruning import can_match


@dataclass(frozen=True)
class Split:
    """The rows whose hash, in [0, 1), is between `low` and `high`.

    Attributes:
        key: the column that is hashed; None hashes the row's address.
        seed: another seed gives another split.
        low: the lower bound, included.
        high: the upper bound, excluded.
    """

    key: str | None
    seed: int
    low: float
    high: float


def to_expression(filter: Any, schema: pa.Schema) -> pc.Expression | None:
    """Convert a filter to an Arrow expression, and check it against the table's columns.

    Args:
        filter: an expression such as `pc.field("year") > 2020`, or a list of tuples such as `[("year", ">", 2020)]`
            (all must hold; in a list of such lists, any of the lists). `("year", "!=", None)` selects rows in which it
            isn't null.
        schema: the table's schema.

    Raises:
        DataError: an unknown column, or types that can't be compared.
    """
    if filter is None:
        return None
    try:
        expression = filter if isinstance(filter, pc.Expression) else _from_tuples(filter)
        _keeps(expression, schema.empty_table())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError, ValueError) as error:
        missing = re.search(r"FieldRef\.Name\((.*?)\)", str(error))
        if missing:
            raise DataError(f"filter: no column {missing[1]!r}. {did_you_mean(missing[1], schema.names)}") from None
        raise DataError(
            f"filter={filter!r} can't be applied ({error}). Expected an expression such as "
            'pc.field("year") > 2020, or tuples such as [("year", ">", 2020)].'
        ) from error
    return expression


def _from_tuples(filter: Any) -> pc.Expression:
    """Convert tuples. pyarrow does this too, but in its comparison with null nothing passes."""
    if not isinstance(filter, (list, tuple)) or not all(filter):
        raise TypeError("neither an expression nor tuples")
    alternatives = [filter] if isinstance(filter[0][0], str) else filter
    conjunctions = [functools.reduce(operator.and_, map(_condition, conditions)) for conditions in alternatives]
    return functools.reduce(operator.or_, conjunctions)


def _condition(condition: Any) -> pc.Expression:
    if len(condition) == 3 and condition[2] is None:
        name, sign, _ = condition
        if sign in ("=", "=="):
            return pc.field(name).is_null()
        if sign == "!=":
            return pc.field(name).is_valid()
        raise ValueError(f"{sign} null is never true; use = or !=")
    return pq.filters_to_expression([condition])


def to_text(expression: pc.Expression | None) -> str | None:
    """Return a filter as text for a checkpoint: Arrow's own form of it, in hexadecimal digits."""
    if expression is None:
        return None
    _, (form,) = expression.__reduce__()
    return bytes(form).hex()


def from_text(text: str | None) -> pc.Expression | None:
    """Return the filter of a text that `to_text` made. No code of it is run."""
    return None if text is None else pc.Expression._deserialize(pa.py_buffer(bytes.fromhex(text)))


def candidates(source: Source, groups: int, filter: pc.Expression | None) -> list[bool]:
    """Return for each row group if one of its rows can pass the filter, as far as this is known without reading it."""
    if filter is None:
        return [True] * groups
    columns = sorted(_columns_of(filter, source.schema.names))
    return can_match(filter, source.schema, [source.guarantee(number, columns, filter) for number in range(groups)])


def positions(
    source: Source, number: int, group: RowGroup, filter: pc.Expression | None, splits: Sequence[Split]
) -> np.ndarray | None:
    """Return the selected physical rows of a row group, ascending int64; None if all are selected."""
    kept = source.kept(number)
    if filter is None and not splits:
        return kept

    needed = sorted(_columns_of(filter, source.schema.names) | {split.key for split in splits if split.key})
    table = source.read(number, needed) if needed else None
    mask = np.ones(group.num_rows, dtype=bool)
    if kept is not None:
        mask[:] = False
        mask[kept] = True
    if filter is not None:
        assert table is not None
        mask &= _keeps(filter, table)
    for split in splits:
        draws = _hash_addresses(group, split.seed) if split.key is None else _hash_key(table, split.key, split.seed)
        mask &= (draws >= split.low) & (draws < split.high)
    return np.flatnonzero(mask)


def _columns_of(filter: pc.Expression | None, names: Iterable[str]) -> set[str]:
    """Return the columns whose name is part of the filter's text: all columns of the filter, sometimes more."""
    if filter is None:
        return set()
    names = list(names)
    return {name for name in names if name in str(filter)} or set(names)


def _keeps(expression: pc.Expression, table: pa.Table) -> np.ndarray:
    # This imports pandas if it is installed, which takes time and memory. So it is imported only when a filter is used.
    import pyarrow.dataset as ds

    kept = ds.dataset(table).scanner(columns={"kept": expression}, use_threads=False).to_table()["kept"]
    return kept.cast(pa.bool_()).fill_null(False).to_numpy()


def _hash_addresses(group: RowGroup, seed: int) -> np.ndarray:
    """Return a number in [0, 1) for each row: the hash of its file's name, its row group and its number there."""
    name = f"{seed}/{group.file.rsplit('/', 1)[-1]}/{group.index}"
    start = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return _mix(np.arange(group.num_rows, dtype=np.uint64) + np.uint64(start))


def _hash_key(table: pa.Table | None, key: str, seed: int) -> np.ndarray:
    """Return a number in [0, 1) for each row: the hash of its key's value."""
    assert table is not None
    column = table.column(key).combine_chunks()
    encoded = column.dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    salt = str(seed).encode()
    # One hash for each distinct value, and one for null.
    hashes = [
        int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8, key=salt).digest(), "little")
        for value in [*encoded.dictionary.to_pylist(), None]
    ]
    indices = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False)
    return _mix(np.array(hashes, dtype=np.uint64)[indices])


def _mix(values: np.ndarray) -> np.ndarray:
    """Mix the bits (the finaliser of splitmix64), and scale to [0, 1)."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((values ^ (values >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
