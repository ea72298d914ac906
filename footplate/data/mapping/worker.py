"""The worker process of `Table.map`: it calls the user's function for the rows of a row group, batch by batch.

    first message    the function, by cloudpickle, and the hash that it had
    each request     the rows of a row group, as an Arrow file
    each reply       the results as an Arrow file and their description, or an error

The function is hashed again here. Another hash means that this process has another function: a module was edited after it
was imported, or an object in a module was changed, which a new process doesn't know. Then every reply is an error.

This file imports no torch, so that a worker starts quickly.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pyarrow as pa

from footplate.core.errors import DataError
from footplate.core.identity.function_identity import UnknownIdentity, function_identity
from footplate.data.mapping.store import GroupResults, describe, from_bytes, to_bytes, unified
from footplate.data.pipeline.worker_process import freeze_error, serving
from footplate.data.sources.memory import arrow_column

# Change docs/guide/tokenize.md and `_LAYOUT` in table.py with these: a function may see the rows of its batch.
BATCH_ROWS = 1000
BATCH_BYTES = 8 * 2**20

# A function of a batch, a dict of lists, that returns columns of the same length.
Function = Callable[[dict[str, list[Any]]], Mapping[str, Any]]


@dataclass(frozen=True)
class Failure:
    """An error of a worker.

    Attributes:
        first: the first row of the batch, among the rows of the request; None if no batch is at fault.
        error: the error; None if it can't be sent.
        text: its traceback.
    """

    first: int | None
    error: bytes | None
    text: str

    @classmethod
    def of(cls, error: Exception, first: int | None = None) -> Failure:
        """Make it of an error and the first row of the batch."""
        return cls(first, freeze_error(error), "".join(traceback.format_exception(error)))


class BatchError(Exception):
    """An error for one batch. Its cause is the error.

    Attributes:
        first: the first row of the batch.
    """

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self.first = first


def serve(descriptor: int) -> None:
    """Run a worker until its socket closes.

    Args:
        descriptor: the file descriptor of the socket.
    """
    with contextlib.suppress(EOFError, OSError):
        connection = serving(descriptor)
        content, identity = pickle.loads(connection.recv_bytes())
        function, failure = _loaded(content, identity)
        while True:
            request = connection.recv_bytes()
            reply = (None, failure) if function is None else _reply(function, request)
            connection.send_bytes(pickle.dumps(reply))


def _loaded(content: bytes, identity: str | None) -> tuple[Function | None, Failure | None]:
    """Return the function, or the reason why it can't be used."""
    try:
        function = _unpickled(content)
        if identity is not None:
            _check_same(function, identity)
    except Exception as error:
        return None, Failure.of(error)
    return function, None


def _unpickled(content: bytes) -> Function:
    try:
        return cloudpickle.loads(content)
    except Exception as error:
        raise DataError(
            f"The function can't be loaded in a worker process ({error}). Move what it uses to a module that your script "
            "imports, such as a function with functools.lru_cache."
        ) from error


def _check_same(function: Function, identity: str) -> None:
    try:
        own = function_identity(function)
    except UnknownIdentity as error:
        own = str(error)
    if own != identity:
        raise DataError(
            "The function is another one in a new process. A module that it uses was edited after it was imported, or an "
            "object in a module was changed. Start again after an edit. Pass an object that you change as an argument: "
            'functools.partial(function, tokenizer). If you did neither, give version="…".'
        )


def _reply(function: Function, request: bytes) -> tuple[tuple[bytes, GroupResults] | None, Failure | None]:
    try:
        content = to_bytes(apply(function, from_bytes(request)))
        # The description is that of the stored form, whose size in memory may differ.
        return (content, describe(from_bytes(content))), None
    except BatchError as batch_error:
        error = batch_error.__cause__
        assert isinstance(error, Exception)
        return None, Failure.of(error, batch_error.first)
    except Exception as error:
        return None, Failure.of(error)


def apply(function: Function, rows: pa.Table) -> pa.Table:
    """Call a function for some rows, batch by batch, and return its columns.

    Raises:
        BatchError: the function raised an error, or its result doesn't fit the rows.
    """
    size = max(1, min(BATCH_ROWS, BATCH_BYTES * rows.num_rows // max(1, rows.nbytes)))
    results: list[pa.Table] = []
    for first in range(0, rows.num_rows, size):
        batch = rows.slice(first, size)
        try:
            result = _table(function(batch.to_pydict()), batch.num_rows)
            unified([earlier.schema for earlier in results[:1]] + [result.schema])
        except Exception as error:
            raise BatchError(first) from error
        results.append(result)
    return pa.concat_tables(results, promote_options="default").combine_chunks() if results else pa.table({})


def _table(result: Any, num_rows: int) -> pa.Table:
    """Make a table of the columns that a function returned.

    Raises:
        DataError: they don't fit the rows.
    """
    if not isinstance(result, Mapping) or not result:
        raise DataError(
            f"The function returned {type(result).__name__}. Expected a dict of columns, such as "
            '{"tokens": [[1, 2], [3]]}.'
        )
    columns = {}
    for name, values in result.items():
        if not isinstance(name, str) or not hasattr(values, "__len__") or isinstance(values, (str, bytes, Mapping)):
            raise DataError(
                f"The function returned {type(values).__name__} as column {name!r}. Expected a list or an array with one "
                "value for each row."
            )
        if len(values) != num_rows:
            raise DataError(
                f"The function returned {len(values)} values of column {name!r} for {num_rows} rows. Expected one for each "
                "row. Return an empty list for a row that has nothing."
            )
        try:
            columns[name] = pa.table({name: arrow_column(values)}).column(0)
        except (pa.ArrowException, ValueError) as error:
            raise DataError(
                f"Column {name!r} of the function's result can't be kept ({error}). Return lists, numpy arrays or Arrow "
                "arrays, with values of one type."
            ) from error
    return pa.table(columns)
