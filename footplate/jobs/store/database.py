"""The interface between the store and a database: transactions that are done completely or not at all, and can be repeated.

A transaction's work is a function of `execute`. If the database is busy or the connection breaks, the function is called
again. It then finds the result of its first call if that was committed after all. So it must be written to be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Execute = Callable[..., Sequence[tuple[Any, ...]]]
"""`execute(sql, *values)`: run a statement with a `?` for each value, and return the rows. An UPDATE uses RETURNING."""


class Database(Protocol):
    """A connection that one thread of one process uses."""

    def transaction(self, work: Callable[[Execute], T]) -> T:
        """Do the work in a transaction, and return its result. An exception rolls the transaction back.

        Raises:
            Unavailable: the database can't be used, or takes too long to answer.
        """
        ...

    def read(self, sql: str, *values: Any) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a query. It doesn't wait for a writer. It raises what `transaction` raises."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...
