"""Petastorm's predicates: they choose a reader's rows by a Python function of some columns.

    with make_reader(url, predicate=in_lambda(["label"], lambda label: label != 3)) as reader:
        ...

A predicate has `get_fields()`, the columns that it reads, and `do_include(values)`, which gets a dict of their values. A
class of your own with these two methods works as well. Use `filters=` instead where it can express the same choice: Arrow
applies a filter, and skips row groups without reading them, so a filter is faster.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from footplate.core.errors import ConfigError

# Petastorm's number of hash buckets on a 64-bit machine.
_BUCKETS = 2**63 - 1


class PredicateBase:
    """The two methods of a predicate.

    Examples:
        >>> from footplate.compat.petastorm import PredicateBase, make_reader
        >>> class Even(PredicateBase):
        ...     def get_fields(self):
        ...         return {"label"}
        ...
        ...     def do_include(self, values):
        ...         return values["label"] % 2 == 0
        >>> with make_reader("flowers.parquet", predicate=Even()) as reader:
        ...     sorted({int(row.label) for row in reader})
        [0, 2]
    """

    def get_fields(self) -> set[str]:
        """The columns that `do_include` needs."""
        raise NotImplementedError

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Return True if a row with these values is read."""
        raise NotImplementedError


def check_predicate(predicate: Any) -> None:
    """Check that an object is a predicate, or None.

    Raises:
        ConfigError: an object without `get_fields` or `do_include`, or a predicate that reads no column.
    """
    if predicate is not None and not (hasattr(predicate, "get_fields") and hasattr(predicate, "do_include")):
        raise ConfigError(
            f"predicate={predicate!r}: expected one of Petastorm's predicates, such as in_lambda([COLUMN], FUNCTION), or "
            "an object with get_fields() and do_include(values)."
        )
    if predicate is not None and not list(predicate.get_fields()):
        raise ConfigError(f"predicate={predicate!r}: its get_fields() names no column.")


class in_set(PredicateBase):
    """Chooses rows whose value is one of `inclusion_values`.

    Examples:
        >>> from footplate.compat.petastorm import in_set, make_reader
        >>> with make_reader("flowers.parquet", predicate=in_set({0, 2}, "label")) as reader:
        ...     sorted({int(row.label) for row in reader})
        [0, 2]
    """

    def __init__(self, inclusion_values: Iterable[Any], predicate_field: str) -> None:
        self._values, self._field = set(inclusion_values), predicate_field

    def get_fields(self) -> set[str]:
        """The one column."""
        return {self._field}

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Return True if the value is in the set."""
        return values[self._field] in self._values


class in_intersection(PredicateBase):
    """Chooses rows whose value, a collection, has at least one of `inclusion_values`.

    Examples:
        >>> from footplate.compat.petastorm import in_intersection, make_reader
        >>> with make_reader("flowers.parquet", predicate=in_intersection({0.125}, "x")) as reader:
        ...     len(list(reader))
        1
    """

    def __init__(self, inclusion_values: Iterable[Any], predicate_list_field: str) -> None:
        self._values, self._field = set(inclusion_values), predicate_list_field

    def get_fields(self) -> set[str]:
        """The one column."""
        return {self._field}

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Return True if the collection and the set have a value in common."""
        collection = values[self._field]
        return collection is not None and not self._values.isdisjoint(collection)


class in_lambda(PredicateBase):
    """Chooses rows for which a function of their values returns True.

    Args:
        predicate_fields: the columns, in the order of the function's arguments.
        predicate_func: the function.
        state_arg: the function's last argument; None for no such argument.

    Examples:
        >>> from footplate.compat.petastorm import in_lambda, make_reader
        >>> chosen = in_lambda(["label", "x"], lambda label, x: label != 1 and x[0] < 0.5)
        >>> with make_reader("flowers.parquet", predicate=chosen) as reader:
        ...     len(list(reader))
        3
    """

    def __init__(
        self, predicate_fields: Sequence[str], predicate_func: Callable[..., bool], state_arg: Any = None
    ) -> None:
        if isinstance(predicate_fields, str):
            raise ConfigError(f"in_lambda({predicate_fields!r}, …): give a list of columns: [{predicate_fields!r}].")
        self._fields, self._function = list(predicate_fields), predicate_func
        self._state = () if state_arg is None else (state_arg,)

    def get_fields(self) -> set[str]:
        """The function's columns."""
        return set(self._fields)

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Return the function's answer."""
        return bool(self._function(*(values[name] for name in self._fields), *self._state))


class in_negate(PredicateBase):
    """Chooses rows that another predicate leaves out.

    Examples:
        >>> from footplate.compat.petastorm import in_negate, in_set, make_reader
        >>> with make_reader("flowers.parquet", predicate=in_negate(in_set({0}, "label"))) as reader:
        ...     sorted({int(row.label) for row in reader})
        [1, 2]
    """

    def __init__(self, predicate: PredicateBase) -> None:
        self._predicate = predicate

    def get_fields(self) -> set[str]:
        """The other predicate's columns."""
        return self._predicate.get_fields()

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Return the opposite of the other predicate's answer."""
        return not self._predicate.do_include(values)


class in_reduce(PredicateBase):
    """Chooses rows by several predicates: `reduce_func`, such as `all` or `any`, gets the list of their answers.

    Examples:
        >>> from footplate.compat.petastorm import in_intersection, in_reduce, in_set, make_reader
        >>> both = in_reduce([in_set({0}, "label"), in_intersection({0.0}, "x")], all)
        >>> with make_reader("flowers.parquet", predicate=both) as reader:
        ...     len(list(reader))
        1
    """

    def __init__(self, predicate_list: Collection[PredicateBase], reduce_func: Callable[[list[bool]], bool]) -> None:
        self._predicates, self._reduce = list(predicate_list), reduce_func

    def get_fields(self) -> set[str]:
        """The columns of all predicates."""
        return set().union(*(predicate.get_fields() for predicate in self._predicates))

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Return the result of `reduce_func` on the answers."""
        return bool(self._reduce([predicate.do_include(values) for predicate in self._predicates]))


class in_pseudorandom_split(PredicateBase):
    """Chooses the rows of one part of a table by a hash of a column, as Petastorm does.

    Args:
        fraction_list: the parts' shares, such as `[0.8, 0.2]`.
        subset_index: the number of the part, from 0.
        predicate_field: the column to hash.

    Examples:
        >>> from footplate.compat.petastorm import in_pseudorandom_split, make_reader
        >>> parts = [in_pseudorandom_split([0.8, 0.2], number, "x") for number in (0, 1)]
        >>> counts = []
        >>> for part in parts:
        ...     with make_reader("flowers.parquet", predicate=part) as reader:
        ...         counts.append(len(list(reader)))
        >>> sum(counts)
        8
    """

    def __init__(self, fraction_list: Sequence[float], subset_index: int, predicate_field: str) -> None:
        if not 0 <= subset_index < len(fraction_list):
            raise ConfigError(f"subset_index={subset_index}: there are {len(fraction_list)} parts, from 0.")
        if min(fraction_list) < 0 or sum(fraction_list) > 1 + 1e-9:
            raise ConfigError(f"fraction_list={list(fraction_list)}: expected shares of at least 0 and 1 in all.")
        self._low = sum(fraction_list[:subset_index]) * (_BUCKETS - 1)
        self._high = sum(fraction_list[: subset_index + 1]) * (_BUCKETS - 1)
        self._field = predicate_field

    def get_fields(self) -> set[str]:
        """The hashed column."""
        return {self._field}

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Return True if the value's hash is in the part."""
        digest = hashlib.md5(str(values[self._field]).encode(), usedforsecurity=False).digest()
        return self._low <= int.from_bytes(digest, "big") % _BUCKETS < self._high
