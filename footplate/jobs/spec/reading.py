"""Read plain values, from YAML and flags, into the dataclasses of a model, and convert those back.

A mapping is a frozen dataclass, and its fields are the keys: `worker_count` is `workerCount` in the values. The type of a
field determines how its value is read:

    Annotated[int, Form(read)]    by `read`, which raises a `Mistake`
    a dataclass                   as a mapping with its keys and no others
    list[T], dict[K, V]           each item, or each key and value; as many as `Size` allows
    T | None                      as T; the key is optional

All mistakes are found in one pass. A value that can't be read is left out, as if its key were missing, and reading goes on.
A mapping that then lacks a required key is left out itself. So is a list with a wrong item, since the other items would
get wrong indices.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from footplate.jobs.spec.problems import Path

T = TypeVar("T")

_MAPPING = "expected keys with values below it."
# Stands for a value that was left out.
_NOTHING: Any = object()


class Mistake(ValueError):
    """A value that can't be read. The text names the value, and what was expected."""


@dataclass(frozen=True)
class Form:
    """A function that reads a value: it returns the value in its final form, or raises a `Mistake`."""

    read: Callable[[Any], Any]


@dataclass(frozen=True)
class Size:
    """The allowed number of items of a list or a dict."""

    least: int = 0
    most: float = float("inf")

    def refusal(self, count: int) -> str:
        """Explain why `count` items are too many or too few; empty if they are allowed."""
        if count > self.most:
            return f"expected at most {self.most} items."
        return f"expected at least {self.least} item." if count < self.least else ""


ANY = Size()


@dataclass(frozen=True)
class Key:
    """A key of a mapping: its field, its type, and whether it is required."""

    field: str
    hint: Any
    needed: bool


@dataclass
class Reading:
    """Reads values, and collects what is wrong with them.

    Attributes:
        unknown: makes the message for the unknown key that a path leads to.
        mistakes: the path of each mistake, and a sentence.
        left_out: the paths of the values that were left out.
    """

    unknown: Callable[[Path], str]
    mistakes: list[tuple[Path, str]] = field(default_factory=list)
    left_out: list[Path] = field(default_factory=list)

    def read(self, kind: type[T], values: dict[str, Any]) -> T:
        """Read values as a mapping, all of whose keys are optional."""
        return self._mapping(kind, values, ())

    def _mapping(self, kind: type[Any], values: Any, path: Path) -> Any:
        if not isinstance(values, dict):
            return self._wrong(path, _MAPPING)
        known, arguments, whole = keys(kind), {}, True
        for name, key in known.items():
            value = _NOTHING
            if values.get(name) is not None:
                value = self._value(key.hint, values[name], (*path, name))
            elif key.needed:
                self.mistakes.append(((*path, name), "missing."))
            if value is not _NOTHING:
                arguments[key.field] = value
            elif key.needed:
                whole = False

        for name in [name for name in values if name not in known]:
            self._wrong((*path, name), self.unknown((*path, name)))
        return kind(**arguments) if whole else self._leave_out(path)

    def _value(self, hint: Any, value: Any, path: Path) -> Any:
        metadata = next(iter(getattr(hint, "__metadata__", ())), None)
        inner = hint.__origin__ if metadata else hint
        if isinstance(metadata, Form):
            try:
                return metadata.read(value)
            except Mistake as mistake:
                return self._wrong(path, str(mistake))
        size = metadata if isinstance(metadata, Size) else ANY
        if typing.get_origin(inner) is list:
            (item,) = typing.get_args(inner)
            return self._list(item, size, value, path)
        if typing.get_origin(inner) is dict:
            key, item = typing.get_args(inner)
            return self._dict(key, item, size, value, path)
        return self._mapping(inner, value, path)

    def _list(self, item: Any, size: Size, value: Any, path: Path) -> Any:
        if not isinstance(value, list):
            return self._wrong(path, "expected a list: each item on its own line after a dash, or [a, b].")
        if text := size.refusal(len(value)):
            return self._wrong(path, text)
        items = [self._value(item, element, (*path, index)) for index, element in enumerate(value)]
        return self._leave_out(path) if any(read is _NOTHING for read in items) else items

    def _dict(self, key: Any, item: Any, size: Size, value: Any, path: Path) -> Any:
        if not isinstance(value, dict):
            return self._wrong(path, _MAPPING)
        if text := size.refusal(len(value)):
            return self._wrong(path, text)
        mapping = {}
        for name, element in value.items():
            key_path = (*path, name)
            read = self._value(key, name, key_path), self._value(item, element, key_path)
            if _NOTHING not in read:
                mapping[read[0]] = read[1]
        return mapping

    def _wrong(self, path: Path, text: str) -> Any:
        self.mistakes.append((path, text))
        return self._leave_out(path)

    def _leave_out(self, path: Path) -> Any:
        self.left_out.append(path)
        return _NOTHING


@cache
def keys(kind: type[Any]) -> dict[str, Key]:
    """The keys of a mapping, in the spelling of the values."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        camel(field.name): Key(
            field.name, _without_none(hints[field.name]), field.default is MISSING and field.default_factory is MISSING
        )
        for field in fields(kind)
    }


def mapping_in(hint: Any) -> type[Any] | None:
    """The mapping of a type, or of a list's items; None if there is none."""
    if hasattr(hint, "__metadata__"):
        hint = hint.__origin__
    if typing.get_origin(hint) is list:
        return mapping_in(typing.get_args(hint)[0])
    return hint if is_dataclass(hint) and isinstance(hint, type) else None


def plain(value: Any) -> Any:
    """Convert a mapping to plain values. Reading them gives the same mapping again."""
    if is_dataclass(value):
        return {
            name: plain(item)
            for name, key in keys(type(value)).items()
            if (item := getattr(value, key.field)) is not None
        }
    return [plain(item) for item in value] if isinstance(value, list) else value


def _without_none(hint: Any) -> Any:
    """The T of `T | None`."""
    parts = typing.get_args(hint)
    return next(part for part in parts if part is not type(None)) if type(None) in parts else hint


def camel(name: str) -> str:
    """Convert a field's name to a key.

    >>> camel("parameter_server_type")
    'parameterServerType'
    """
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)
