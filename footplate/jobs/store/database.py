"""What the store needs of a database: transactions that are done whole or not at all, and may be repeated.

The work of a transaction is a function of `execute`. It may be called again, when the database was busy or the connection
broke, and then finds what its first call has left if that was committed all the same: so it must be written to be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Execute = Callable[..., Sequence[tuple[Any, ...]]]
"""`execute(sql, *values)`: runs a statement, with a `?` for each value; returns the rows. An UPDATE says RETURNING."""


class Database(Protocol):
    """One connection, of one process and one thread."""

    def transaction(self, work: Callable[[Execute], T]) -> T:
        """Do the work in a transaction, and return what it returned; an exception of it undoes all.

        Raises:
            Unavailable: the database can't be used, or doesn't answer for too long.
        """
        ...

    def read(self, sql: str, *values: Any) -> Sequence[tuple[Any, ...]]:
        """The rows of one query, which waits for no writer; raises as `transaction` does."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...
