"""Sequences of packed documents as a source: a row is a sequence, and a row group is a unit of packing.

    documents     tokens: list<int32>              one document a row
    sequences     tokens: list<list<int32>>        the pieces of documents in a sequence, one sequence a row

`footplate/data/order/packing.py` explains pieces, sequences and units. The order of events:

1. Before the first batch, the lengths of all documents are read, unit by unit, to count the sequences of each unit. A cache
   keeps these counts, a few bytes for each unit.
2. When a unit is read, its documents are packed again, by the lengths that were read. If that gives another number of
   sequences, the documents have changed, which is an error.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from footplate.core.errors import DataError
from footplate.core.hashing import hashed
from footplate.data.array_cache import load_array, save_array
from footplate.data.order.packing import PackPlan, gather_units, plan_packing
from footplate.data.sources.arrow import indices
from footplate.data.sources.base import RowGroup, WholeGroupSource
from footplate.data.sources.column_types import plain_type
from footplate.data.sources.group_scan import scan_groups

if TYPE_CHECKING:
    from footplate.data.table import Table

# Change this if the same documents are packed into other sequences.
_ALGORITHM = 1
# Pieces of this many tokens or more, on average, are copied faster piece by piece than token by token.
_LONG_PIECE = 256


@dataclass(frozen=True)
class Packing:
    """How documents become sequences.

    Attributes:
        sequence_length: the number of tokens of a sequence.
        truncate: keep only the first `sequence_length` tokens of a document. Otherwise it is cut, and no token is lost.
        padding_value: the value of places after the last document of a sequence, for each column.
    """

    sequence_length: int
    truncate: bool
    padding_value: dict[str, int | float]

    @property
    def key(self) -> str:
        """A hash of everything that the sequences depend on, beside the documents."""
        return hashed(_ALGORITHM, asdict(self))


class PackedSource(WholeGroupSource):
    """The sequences of a table of documents; see `Source` for its methods.

    Args:
        documents: a table whose columns are lists of numbers. The lists of a row have the same length.
        packing: how documents become sequences.
        cache: a local directory that keeps the numbers of sequences.

    Raises:
        DataError: a column of another type.
    """

    def __init__(self, documents: Table, packing: Packing, cache: str | os.PathLike[str] | None = None) -> None:
        self.documents, self.packing, self._cache = documents, packing, cache
        self.uri, self.kind = documents.uri, documents.kind
        self.in_memory, self.is_remote = documents.in_memory, documents.is_remote
        types = {field.name: pa.list_(list_type(documents, field)) for field in documents.schema}
        self.schema = pa.schema([pa.field(name, kind) for name, kind in types.items()])
        group_bytes = documents.selected_bytes()
        # (units + 1,): where the row groups of each unit begin and end
        self._edges = gather_units(group_bytes, packing.sequence_length)
        self._unit_bytes = [sum(group_bytes[start:stop]) for start, stop in pairwise(self._edges.tolist())]

    @property
    def version(self) -> int | str:
        """The version of the documents."""
        return self.documents.version

    @property
    def content(self) -> str:
        """The content of the documents."""
        return self.documents.digest.content

    @property
    def written(self) -> str:
        """When the documents were written."""
        return self.documents.digest.written

    @property
    def files(self) -> Sequence[str]:
        """The files of the documents."""
        return self.documents.files

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """The number of sequences of each unit, (units,) int64. The first call reads the lengths of all documents."""
        file = None if self._cache is None else Path(self._cache) / f"{self._key}.npy"
        kept = None if file is None else load_array(file)
        if kept is not None:
            return kept
        sizes = scan_groups(lambda unit: self.plan(unit).num_sequences, range(len(self._unit_bytes)), self.is_remote)
        counts = np.array(list(sizes), np.int64)
        if file is not None:
            save_array(file, counts)
        return counts

    def groups(self, columns: Sequence[str] | None = None) -> list[RowGroup]:
        """List the units, each under the file of its first document."""
        row_groups = self.documents.row_groups
        firsts = [row_groups[start].file for start in self._edges[:-1].tolist()]
        counted = zip(firsts, self.counts.tolist(), self._unit_bytes, strict=True)
        return [RowGroup(file, unit, count, nbytes) for unit, (file, count, nbytes) in enumerate(counted)]

    def plan(self, unit: int) -> PackPlan:
        """Read the lengths of a unit's documents, and pack them."""
        return self._plan(self._read_documents(unit, self.schema.names[:1])[0])

    def document_rows(self, unit: int) -> np.ndarray:
        """Return the row group of each document of a unit, and the number of its row there, (documents, 2) int64."""
        groups = self._groups_of(unit)
        sizes = [self.documents.row_groups[group].num_rows for group in groups]
        numbers = np.concatenate([np.arange(size) for size in sizes])
        return np.stack([np.repeat(groups, sizes), numbers], axis=1)

    def kept(self, group: int) -> None:
        """Return None: no sequence is deleted."""

    def nulls(self, column: str) -> int:
        """Return 0: a null list is an empty document."""
        return 0

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Read the documents of a unit, and pack them.

        Raises:
            DataError: the lists of a row differ in length, or the documents have changed since they were counted.
        """
        lists = self._read_documents(group, columns)
        plan = self._plan(lists[0])
        for name, column in zip(columns[1:], lists[1:], strict=True):
            differs = np.flatnonzero(column.lengths != lists[0].lengths)
            if len(differs):
                where = self.documents.where(*self.document_rows(group)[differs[0]].tolist())
                raise DataError(
                    f"{where}: column {columns[0]!r} has {lists[0].lengths[differs[0]]} items and column {name!r} has "
                    f"{column.lengths[differs[0]]}. Documents are packed by their tokens, so the columns of a row "
                    "must have the same length: repair the row, or leave the column out with columns=[…]."
                )
        if plan.num_sequences != self.counts[group]:
            raise DataError(
                f"{self.uri}: the documents of {self.groups()[group].file} make {plan.num_sequences} sequences, and made "
                f"{self.counts[group]} when they were counted. The file, or the cache of the counts, has changed: begin "
                "again with files that don't change, and an empty cache=."
            )
        schema = pa.schema([self.schema.field(name) for name in columns])
        return pa.table([_packed(column, plan) for column in lists], schema=schema)

    def _plan(self, lists: _Lists) -> PackPlan:
        return plan_packing(lists.lengths, self.packing.sequence_length, self.packing.truncate)

    def _groups_of(self, unit: int) -> range:
        return range(int(self._edges[unit]), int(self._edges[unit + 1]))

    def _read_documents(self, unit: int, columns: Sequence[str]) -> list[_Lists]:
        table = pa.concat_tables(self.documents.read_groups(self._groups_of(unit), columns))
        return [_Lists.of(column) for column in table.columns]

    @property
    def _key(self) -> str:
        """The name of the counts in a cache."""
        names = self.schema.names[:1], self._edges
        return f"sequences-{hashed(self.documents.digest.key, self.packing.key, *names)[:20]}"


@dataclass(frozen=True)
class _Lists:
    """A column of lists in one piece.

    Attributes:
        items: the items of all lists. Some of them may be in no list.
        starts: where each list begins, (rows,) int64.
        lengths: the number of items of each list, (rows,) int64; 0 for a null.
    """

    items: pa.Array
    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> _Lists:
        """Read a column of a table."""
        chunks = column.chunks
        lists = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
        offsets = lists.offsets.to_numpy().astype(np.int64)
        lengths = np.diff(offsets)
        if lists.null_count:
            lengths = np.where(lists.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
        return cls(lists.values, offsets[:-1], lengths)


def _packed(lists: _Lists, plan: PackPlan) -> pa.Array:
    """Return the pieces of each sequence, an Arrow array of lists of lists."""
    begins = lists.starts[plan.document] + plan.start
    # offsets: (pieces + 1,), where each piece begins among all tokens
    offsets = indices(np.concatenate([[0], np.cumsum(plan.length)])).cast(pa.int32())
    pieces = pa.ListArray.from_arrays(offsets, _gathered(lists.items, begins, plan.length))
    return pa.ListArray.from_arrays(indices(plan.first_piece).cast(pa.int32()), pieces)


def _gathered(items: pa.Array, begins: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """Return some slices of an array, one after another."""
    tokens = int(lengths.sum())
    if items.null_count or pt.is_boolean(items.type) or tokens < _LONG_PIECE * len(lengths):
        # Half as wide numbers take half the time.
        kind = np.int32 if len(items) < 2**31 else np.int64
        number = np.repeat((begins - (np.cumsum(lengths) - lengths)).astype(kind), lengths)
        number += np.arange(tokens, dtype=kind)
        return items.take(indices(number))

    # This copies slice by slice, where `take` would go from item to item. Arrow uses its memory again. Memory of the system
    # would be cleared first.
    values = np.frombuffer(items.buffers()[1] or b"", np.dtype(f"u{items.type.bit_width // 8}"))[items.offset :]
    spans = zip(begins.tolist(), (begins + lengths).tolist(), strict=True)
    gathered = pa.allocate_buffer(tokens * values.itemsize)
    out = np.frombuffer(gathered, values.dtype)
    np.concatenate([values[:0], *(values[begin:end] for begin, end in spans)], out=out)
    return pa.Array.from_buffers(items.type, tokens, [None, gathered])


def list_type(documents: Table, field: pa.Field) -> pa.DataType:
    """Return the type of a column of documents.

    Raises:
        DataError: it isn't a list of numbers.
    """
    kind = plain_type(field.type)
    is_list = pt.is_list(kind) or pt.is_large_list(kind)
    if is_list and (
        pt.is_integer(kind.value_type) or pt.is_floating(kind.value_type) or pt.is_boolean(kind.value_type)
    ):
        return pa.list_(kind.value_type)
    raise DataError(
        f"{documents.uri}: column {field.name!r} is {field.type}, and only lists of numbers are packed. Choose the "
        "columns of tokens with columns=[…], or make tokens of a text with Table.map."
    )
