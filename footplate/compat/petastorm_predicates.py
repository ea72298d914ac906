"""Petastorm's predicates: which rows a reader gives, by a Python function of some of their columns.

    with make_reader(url, predicate=in_lambda(["label"], lambda label: label != 3)) as reader:
        ...

A predicate has `get_fields()`, the columns that it looks at, and `do_include(values)`, which is given a dict of them. A
class of your own with these two works as well. A `filters=` is faster where it can say the same: Arrow applies it, and
skips row groups without reading them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from footplate.core.errors import ConfigError

_BUCKETS = 2**63 - 1  # as Petastorm on a 64-bit machine


class PredicateBase:
    """What a predicate has."""

    def get_fields(self) -> set[str]:
        """The columns that `do_include` needs."""
        raise NotImplementedError

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Whether a row with these values is read."""
        raise NotImplementedError


def check_predicate(predicate: Any) -> None:
    """Refuse what is no predicate.

    Raises:
        ConfigError: it has no `get_fields` or no `do_include`, or looks at no column.
    """
    if predicate is not None and not (hasattr(predicate, "get_fields") and hasattr(predicate, "do_include")):
        raise ConfigError(
            f"predicate={predicate!r}: expected one of Petastorm's predicates, such as in_lambda([COLUMN], FUNCTION), or "
            "an object with get_fields() and do_include(values)."
        )
    if predicate is not None and not list(predicate.get_fields()):
        raise ConfigError(f"predicate={predicate!r}: its get_fields() names no column.")


class in_set(PredicateBase):
    """Rows whose value is one of `inclusion_values`."""

    def __init__(self, inclusion_values: Iterable[Any], predicate_field: str) -> None:
        self._values, self._field = set(inclusion_values), predicate_field

    def get_fields(self) -> set[str]:
        """The one column."""
        return {self._field}

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Whether the value is in the set."""
        return values[self._field] in self._values


class in_intersection(PredicateBase):
    """Rows whose value, a collection, has at least one of `inclusion_values`."""

    def __init__(self, inclusion_values: Iterable[Any], predicate_list_field: str) -> None:
        self._values, self._field = set(inclusion_values), predicate_list_field

    def get_fields(self) -> set[str]:
        """The one column."""
        return {self._field}

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Whether the collection and the set have a value in common."""
        found = values[self._field]
        return found is not None and not self._values.isdisjoint(found)


class in_lambda(PredicateBase):
    """Rows for which a function of their values is true.

    Args:
        predicate_fields: the columns, in the order of the function's arguments.
        predicate_func: the function.
        state_arg: its last argument, if it isn't None.
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
        """What the function says."""
        return bool(self._function(*(values[name] for name in self._fields), *self._state))


class in_negate(PredicateBase):
    """Rows that another predicate leaves out."""

    def __init__(self, predicate: PredicateBase) -> None:
        self._predicate = predicate

    def get_fields(self) -> set[str]:
        """The other predicate's columns."""
        return self._predicate.get_fields()

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """The opposite of what the other predicate says."""
        return not self._predicate.do_include(values)


class in_reduce(PredicateBase):
    """Rows by several predicates: `reduce_func`, such as `all` or `any`, is given a list of what they say."""

    def __init__(self, predicate_list: Collection[PredicateBase], reduce_func: Callable[[list[bool]], bool]) -> None:
        self._predicates, self._reduce = list(predicate_list), reduce_func

    def get_fields(self) -> set[str]:
        """The columns of all of them."""
        return set().union(*(predicate.get_fields() for predicate in self._predicates))

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """What `reduce_func` makes of the answers."""
        return bool(self._reduce([predicate.do_include(values) for predicate in self._predicates]))


class in_pseudorandom_split(PredicateBase):
    """Rows of one part of a table, by a hash of a column. A row is in the part that Petastorm puts it in.

    Args:
        fraction_list: the parts' shares, such as `[0.8, 0.2]`.
        subset_index: which part, from 0.
        predicate_field: the column that is hashed.
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
        """Whether the value's hash is in the part."""
        digest = hashlib.md5(str(values[self._field]).encode(), usedforsecurity=False).digest()
        return self._low <= int.from_bytes(digest, "big") % _BUCKETS < self._high
