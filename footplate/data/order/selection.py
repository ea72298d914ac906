"""Which rows of a table are meant: what a filter keeps, and which side of a split a row falls on.

A selection turns into positions, one array for each row group, before the first epoch: so the number of batches is
known, and the same on every rank. Splits go by the hash of a key, or of a row's place (file and number), so a row stays
on its side when the table grows.
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
    """The rows whose hash, in [0, 1), lies between `low` and `high`.

    Attributes:
        key: the column that is hashed; None hashes the row's place.
        seed: another seed gives another split.
        low: from here on.
        high: up to, not including.
    """

    key: str | None
    seed: int
    low: float
    high: float


def to_expression(filter: Any, schema: pa.Schema) -> pc.Expression | None:
    """A filter as an Arrow expression, checked against the columns that there are.

    Args:
        filter: an expression such as `pc.field("year") > 2020`, or a list of tuples such as `[("year", ">", 2020)]`
            (all must hold; a list of such lists: any of them). `("year", "!=", None)` means that it isn't null.
        schema: of the table.

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
    """What tuples mean; Arrow takes them as they are, but in a comparison with null nothing passes."""
    if not isinstance(filter, (list, tuple)) or not all(filter):
        raise TypeError("neither an expression nor tuples")
    alternatives = [filter] if isinstance(filter[0][0], str) else filter
    wholes = [functools.reduce(operator.and_, map(_condition, conditions)) for conditions in alternatives]
    return functools.reduce(operator.or_, wholes)


def _condition(condition: Any) -> pc.Expression:
    if len(condition) == 3 and condition[2] is None:
        name, sign, _ = condition
        if sign in ("=", "=="):
            return pc.field(name).is_null()
        if sign == "!=":
            return pc.field(name).is_valid()
        raise ValueError(f"{sign} null is never true; = and != are")
    return pq.filters_to_expression([condition])


def candidates(source: Source, groups: int, filter: pc.Expression | None) -> list[bool]:
    """For each row group, whether a row of it can pass the filter, by what is known without reading it."""
    if filter is None:
        return [True] * groups
    columns = sorted(_columns_of(filter, source.schema.names))
    return can_match(filter, source.schema, [source.guarantee(number, columns, filter) for number in range(groups)])


def positions(
    source: Source, number: int, group: RowGroup, filter: pc.Expression | None, splits: Sequence[Split]
) -> np.ndarray | None:
    """The physical rows of a row group that are meant, ascending int64; None when all are."""
    kept = source.kept(number)
    needed = sorted(_columns_of(filter, source.schema.names) | {split.key for split in splits if split.key})
    if filter is None and not splits:
        return kept
    table = source.read(number, needed) if needed else None
    mask = np.ones(group.num_rows, dtype=bool)
    if kept is not None:
        mask[:] = False
        mask[kept] = True
    if filter is not None:
        assert table is not None
        mask &= _keeps(filter, table)
    for split in splits:
        hashed = _hash_places(group, split.seed) if split.key is None else _hash_key(table, split.key, split.seed)
        mask &= (hashed >= split.low) & (hashed < split.high)
    return np.flatnonzero(mask)


def _columns_of(filter: pc.Expression | None, names: Iterable[str]) -> set[str]:
    """The columns whose name occurs in the filter's text: all that it refers to, at times more."""
    if filter is None:
        return set()
    names = list(names)
    return {name for name in names if name in str(filter)} or set(names)


def _keeps(expression: pc.Expression, table: pa.Table) -> np.ndarray:
    import pyarrow.dataset as ds  # brings pandas, where that is installed, which takes time and memory

    kept = ds.dataset(table).scanner(columns={"kept": expression}, use_threads=False).to_table()["kept"]
    return kept.cast(pa.bool_()).fill_null(False).to_numpy()


def _hash_places(group: RowGroup, seed: int) -> np.ndarray:
    """A number in [0, 1) for each row, from its file's name, its row group and its number in it."""
    name = f"{seed}/{group.file.rsplit('/', 1)[-1]}/{group.index}"
    start = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return _mix(np.arange(group.num_rows, dtype=np.uint64) + np.uint64(start))


def _hash_key(table: pa.Table | None, key: str, seed: int) -> np.ndarray:
    """A number in [0, 1) for each row, from the value of its key."""
    assert table is not None
    column = table.column(key).combine_chunks()
    encoded = column.dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    salt = str(seed).encode()
    hashed = [
        int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8, key=salt).digest(), "little")
        for value in [*encoded.dictionary.to_pylist(), None]
    ]
    indices = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False)
    return _mix(np.array(hashed, dtype=np.uint64)[indices])


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, then to [0, 1)."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((values ^ (values >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
