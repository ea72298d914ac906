"""A table of sequences, packed from the documents of another table.

    documents = Table("lake/documents", columns=["tokens"])         one list of tokens a row
    table = documents.pack(sequence_length=2048)                    one sequence a row
    for batch in Loader(table, batch_size=8, shuffle=True):
        batch["tokens"]            # int64 (8, 2048)
        batch["document_ids"]      # int64 (8, 2048): 1 for the first document of a sequence, then 2, …; 0 is padding
        batch["position_ids"]      # int64 (8, 2048): the place of a token in its document, or in its piece

A row is a sequence, so a loader, an order and a position know nothing of documents. An epoch has the same sequences each
time, in another order. `footplate/data/order/packing.py` says which documents make a sequence.

`footplate.data.packing.attention` makes attention masks and targets from a batch.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
import pyarrow.types as pt

from footplate.core.errors import ConfigError, DataError
from footplate.core.hashing import hashed
from footplate.data.argument_checks import check_cache, check_count
from footplate.data.digest import Digest
from footplate.data.order.packing import PackPlan
from footplate.data.packing.source import PackedSource, Packing, list_type
from footplate.data.table import RowAddress, Table

# The columns that a batch of sequences has beside those of the table.
ID_COLUMNS = ("document_ids", "position_ids")

# As many units as a table has that is permuted as one window.
_PLANNED_UNITS = 16


@dataclass(frozen=True)
class PieceAddress(RowAddress):
    """The address of a document, or of a piece of it, in a sequence.

    Attributes:
        sequence: the number of its sequence among those that were asked for.
        start: the first of its tokens in the document.
        stop: the token after the last one.
    """

    sequence: int
    start: int
    stop: int


class PackedTable(Table):
    """Sequences of a fixed length. `Table.pack` makes one.

    Args:
        documents: the documents.
        packing: how documents become sequences.
        cache: a local directory that keeps the number of sequences.

    Raises:
        DataError: a column isn't a list of numbers.

    Examples:
        >>> documents = fp.Table({"tokens": [[1, 2, 3], [4, 5], [6]]})
        >>> packed = documents.pack(sequence_length=4)
        >>> packed.columns
        ['tokens']
    """

    # For a `Table`, the completion of the command line would offer packed tables of packed tables, 90 MB of them.
    def __init__(self, documents: Any, packing: Packing, cache: str | os.PathLike[str] | None = None) -> None:
        self.documents, self.packing, self._cache = documents, packing, cache
        self._source = self._packed = PackedSource(documents, packing, cache)
        self._filter, self._splits = None, ()
        self._columns = documents.columns

    @property
    def sequence_bytes(self) -> int:
        """The size of a sequence in a batch, with its ids; at most 8 bytes a value."""
        return 8 * self.packing.sequence_length * (len(self._columns) + len(ID_COLUMNS))

    @property
    def counts_at_once(self) -> bool:
        """True if the sequences are counted."""
        return "counts" in self._packed.__dict__

    @functools.cached_property
    def digest(self) -> Digest:
        """Digest of the documents and of the way in which they are packed."""
        documents = self.documents.digest
        rows = hashed(documents.rows, self.packing.key, self._columns, self._packed.counts)
        return Digest(documents.kind, documents.content, rows, documents.written, documents.uri, documents.version)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_planned", None)
        return state

    def __repr__(self) -> str:
        return f"{self.documents!r}.pack({self.packing.sequence_length})"

    def select(self, columns: Sequence[str]) -> PackedTable:
        """Return the sequences of other columns of the same documents."""
        packing = self.packing
        padding = {name: packing.padding_value[name] for name in columns if name in packing.padding_value}
        return pack(self.documents.select(columns), packing.sequence_length, packing.truncate, padding, self._cache)

    def split(self, shares: Mapping[str, float], key: str | None = None, seed: int = 0) -> NoReturn:
        """Raise an error: the pieces of a document may be in several sequences, so they could be in several parts.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"split={dict(shares)}: a packed table can't be split, since a document may be in several sequences. Split the "
            "documents, and pack each part: table.split(…)[name].pack(…)."
        )

    def pack(self, sequence_length: int, **options: Any) -> NoReturn:
        """Raise an error: the table is packed.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"pack({sequence_length}): this table is packed already, into sequences of {self.packing.sequence_length}. "
            "Pack the table of documents instead."
        )

    def map(self, function: Any, cache: str | os.PathLike[str], **options: Any) -> NoReturn:
        """Raise an error: a function is called for documents, not for sequences.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("map(): this table is packed. Map the documents, and pack the result: table.map(…).pack(…).")

    def where(self, group: int, row: int) -> str:
        """Describe a sequence for a message, by its documents."""
        pieces = self.addresses(np.array([[group, row]]))
        first = pieces[0]
        others = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
        return f"{first.file}, row group {first.row_group}, row {first.row}{others} (the documents of a sequence)"

    def addresses(self, rows: np.ndarray) -> list[RowAddress]:
        """Return the addresses of the documents of some sequences, as `PieceAddress`.

        This reads the lengths of the documents of their units. It keeps those of the last units, since the batches of all
        ranks may take sequences from the same ones.

        Args:
            rows: (n, 2) int64, as `Epoch.rows` returns them: the unit, and the number of the sequence in it.
        """
        addresses: list[RowAddress] = []
        for number, (unit, sequence) in enumerate(rows.tolist()):
            plan, documents = self._planned(unit)
            pieces = slice(plan.first_piece[sequence], plan.first_piece[sequence + 1])
            starts = plan.start[pieces]
            spans = zip(starts.tolist(), (starts + plan.length[pieces]).tolist(), strict=True)
            places = self.documents.addresses(documents[plan.document[pieces]])
            addresses += [
                PieceAddress(**vars(place), sequence=number, start=start, stop=stop)
                for place, (start, stop) in zip(places, spans, strict=True)
            ]
        return addresses

    def record(self) -> dict[str, Any]:
        """Return plain values with which `Table.reopen` finds the same sequences again."""
        return {
            **self.documents.record(),
            "columns": self._columns,
            "packing": asdict(self.packing),
            "digest": self.digest.state_dict(),
        }

    @functools.cached_property
    def _planned(self) -> Callable[[int], tuple[PackPlan, np.ndarray]]:
        """The plan of a unit, and the rows of its documents. Those of the last units are kept."""
        return functools.lru_cache(_PLANNED_UNITS)(
            lambda unit: (self._packed.plan(unit), self._packed.document_rows(unit))
        )


def pack(
    documents: Table,
    sequence_length: int,
    truncate: bool,
    padding_value: float | Mapping[str, float],
    cache: str | os.PathLike[str] | None,
) -> PackedTable:
    """Pack documents into sequences; see `Table.pack`.

    Raises:
        ConfigError: an invalid argument.
        DataError: a column isn't a list of numbers.
    """
    length = check_count("sequence_length", sequence_length)
    if cache is not None:
        check_cache(cache)
    names = documents.columns
    for name in ID_COLUMNS:
        if name in names:
            raise DataError(
                f"{documents.uri}: column {name!r} has the name of a value that packing adds to a batch. Leave it out with "
                "columns=[…], or rename it."
            )
    kinds = {field.name: list_type(documents, field).value_type for field in documents.schema}
    padding = _padding_of(names, padding_value)
    for name, value in padding.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"padding_value={value!r} for column {name!r}: expected a number.")
        # NumPy would cut off the fraction.
        if pt.is_integer(kinds[name]) and not isinstance(value, int):
            raise ConfigError(f"padding_value={value!r} for column {name!r} of {kinds[name]}: expected an integer.")
        # NumPy would make True of any other number.
        if pt.is_boolean(kinds[name]) and value not in (0, 1):
            raise ConfigError(f"padding_value={value!r} for column {name!r} of {kinds[name]}: expected 0 or 1.")
    return PackedTable(documents, Packing(length, bool(truncate), padding), cache)


def _padding_of(names: Sequence[str], value: float | Mapping[str, float]) -> dict[str, float]:
    """Return the padding value of each column.

    Raises:
        ConfigError: a column has none, or there is no such column.
    """
    if isinstance(value, Mapping):
        if {*value} == {*names}:
            return {name: value[name] for name in names}
        given = ", ".join(map(repr, value)) or "none"
    elif len(names) == 1:
        return {names[0]: value}
    else:
        given = repr(value)
    example = ", ".join(f"{name!r}: 0" for name in names)
    raise ConfigError(
        f"padding_value: expected one value for each of the columns {', '.join(names)}; got {given}. Give a value for "
        f"each, such as {{{example}}}. Labels are usually padded with -100, which torch's losses ignore."
    )
