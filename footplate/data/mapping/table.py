"""A table with columns that a function computes from the rows of another table, once.

    def tokenize(batch):
        return {"tokens": [encoding.ids for encoding in tokenizer.encode_batch(batch["text"])]}

    documents = Table("lake/documents", columns=["text"]).map(tokenize, cache="/local/ssd")
    table = documents.pack(sequence_length=2048)

The rows are those of the other table, in its order and with its addresses. So a split, a position and `footplate rows` mean
the rows of the files. The table's digest covers the computed values. So ranks that computed different tokens stop before
they train, and so does a run that resumes with other tokens.

The results are kept under a key of everything that they depend on: the rows, and the function with what it reads
(`footplate.core.identity`). Other rows, an edited function or another tokenizer have another key.
"""

from __future__ import annotations

import os
from typing import Any

from footplate.core.errors import ConfigError, DataError
from footplate.core.hashing import hashed
from footplate.core.identity.function_identity import UnknownIdentity, function_identity, name_of
from footplate.data.argument_checks import check_cache, check_count
from footplate.data.mapping.computing import MappedFunction, computed
from footplate.data.mapping.source import MappedSource
from footplate.data.mapping.store import MappedStore, Results
from footplate.data.mapping.worker import Function
from footplate.data.table import Table

# Change this if the same function gets other batches, or if its results are stored in another way.
_LAYOUT = 1


class MappedTable(Table):
    """A table with computed columns. `Table.map` makes one.

    Its columns are the computed ones. `select` also takes those of the other table's source.

    Args:
        documents: the rows that the function ran for.
        results: the description of the computed columns.
        store: the computed columns.

    Examples:
        >>> def double(batch):
        ...     return {"twice": [2 * label for label in batch["label"]]}
        >>> table = fp.Table("flowers.parquet").map(double, cache="cache")
        >>> table.columns
        ['twice']
    """

    # For a `Table`, the completion of the command line would offer mapped tables of mapped tables.
    def __init__(self, documents: Any, results: Results, store: MappedStore) -> None:
        self.documents, self._store = documents, store
        self._source = MappedSource(documents._source, documents, results, store)
        self._filter, self._splits = None, ()
        self._columns = list(results.schema.names)

    def __repr__(self) -> str:
        return f"{self.documents!r}.map({', '.join(self._columns)})"

    def record(self) -> dict[str, Any]:
        """Return plain values with which `Table.reopen` finds the same rows and their results again."""
        inner = self.documents.record()
        mapping = {"documents": inner, "cache": self._store.cache, "key": self._store.key}
        splits = [[split.key, split.seed, split.low, split.high] for split in self._splits]
        return {"source": inner["source"], "mapping": mapping, "splits": splits, "digest": self.digest.state_dict()}


def map_rows(
    documents: Table, function: Function, cache: str | os.PathLike[str], version: str | None, num_workers: int
) -> MappedTable:
    """Compute columns from the rows of a table; see `Table.map`.

    Raises:
        ConfigError: an invalid argument, or a function whose results can't be told from those of another.
        DataError: the function failed, its results don't fit the rows, or they can't be written.
    """
    if not callable(function):
        raise ConfigError(
            f"map({function!r}): expected a function of a batch of rows, such as "
            'lambda batch: {"tokens": tokenizer(batch["text"])["input_ids"]}.'
        )
    if version is not None and (not isinstance(version, str) or not version):
        raise ConfigError(
            f'version={version!r}: expected a text that names the function and its data, such as "gpt2-1".'
        )
    check_count("num_workers", num_workers)
    check_cache(cache)
    name = name_of(function)
    identity = _identity(function, name) if version is None else None
    key = hashed(_LAYOUT, documents.digest.key, documents.columns, identity or (name, version))[:20]
    store = MappedStore(cache, key)
    results = computed(documents, MappedFunction(function, name, identity, num_workers), store)
    return MappedTable(documents, results, store)


def _identity(function: Function, name: str) -> str:
    try:
        return function_identity(function)
    except UnknownIdentity as error:
        raise ConfigError(
            f"map({name}): the results can't be kept, since they may differ for the same rows. {error}. Do such things "
            "before, and let the function read their result as a variable. Do random things in Loader(transform=). Or give "
            'version="…", and change it whenever the results would change.'
        ) from error


def reopen_mapped(record: dict[str, Any]) -> MappedTable:
    """Open the table of a `MappedTable.record`. The results must be complete.

    Args:
        record: its part "mapping".

    Raises:
        DataError: the other table can't be opened, or the results aren't on this machine.
    """
    documents = Table.reopen(record["documents"])
    store = MappedStore(record["cache"], record["key"])
    results = store.results()
    if results is None:
        raise DataError(
            f"{documents.uri}: the computed columns of the run aren't in {store.directory}. Call Table.map again, and pass "
            "the table: table=…."
        )
    return MappedTable(documents, results, store)
