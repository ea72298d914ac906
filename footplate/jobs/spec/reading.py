"""Plain values, as YAML and flags give them, read as the mappings of a spec; and mappings as plain values again.

A mapping is a frozen dataclass, and its fields are the keys: `worker_count` is `workerCount` in the values. The type of a
field says how its value is read:

    Annotated[int, Form(read)]    by `read`, which raises a `Mistake`
    a mapping                     as a mapping: it has these keys and no others
    list[T], dict[K, V]           each item, each key and value; as many as `Size` says
    T | None                      as T; the key may be left out

All mistakes are found at once: a value that can't be read is left out, as if its key were not there, and the rest is
looked at. A mapping that then lacks a key which it needs is left out itself; so is a list, whose other items would change
places.
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
_NOTHING: Any = object()  # in place of a value that is left out


class Mistake(ValueError):
    """A value that can't be read: its text says what was found, and what was expected."""


@dataclass(frozen=True)
class Form:
    """How a value is read: by a function that returns it as it is to be, or raises a `Mistake`."""

    read: Callable[[Any], Any]


@dataclass(frozen=True)
class Size:
    """How many items there may be, in a list or a dict."""

    least: int = 0
    most: float = float("inf")

    def refusal(self, count: int) -> str:
        """Why so many can't be; empty when they can."""
        if count > self.most:
            return f"at most {self.most} are taken."
        return f"at least {self.least} is needed." if count < self.least else ""


ANY = Size()


@dataclass(frozen=True)
class Key:
    """A key of a mapping: the field that it is, its type, and whether it must be there."""

    field: str
    hint: Any
    needed: bool


@dataclass
class Reading:
    """Reads values, and notes what is wrong with them.

    Attributes:
        unknown: what is said of a key that there isn't, which a path leads to.
        mistakes: the path of each, and a sentence.
        left_out: the paths of what was left out.
    """

    unknown: Callable[[Path], str]
    mistakes: list[tuple[Path, str]] = field(default_factory=list)
    left_out: list[Path] = field(default_factory=list)

    def read(self, kind: type[T], values: dict[str, Any]) -> T:
        """The mapping that values are; each of its keys can be left out."""
        return self._mapping(kind, values, ())

    def _mapping(self, kind: type[Any], values: Any, path: Path) -> Any:
        if not isinstance(values, dict):
            return self._wrong(path, _MAPPING)
        known, found, whole = keys(kind), {}, True
        for name, key in known.items():
            value = _NOTHING
            if values.get(name) is not None:
                value = self._value(key.hint, values[name], (*path, name))
            elif key.needed:
                self.mistakes.append(((*path, name), "missing."))
            if value is not _NOTHING:
                found[key.field] = value
            elif key.needed:
                whole = False
        for name in [one for one in values if one not in known]:
            self._wrong((*path, name), self.unknown((*path, name)))
        return kind(**found) if whole else self._leave_out(path)

    def _value(self, hint: Any, value: Any, path: Path) -> Any:
        note = next(iter(getattr(hint, "__metadata__", ())), None)
        inner = hint.__origin__ if note else hint
        if isinstance(note, Form):
            try:
                return note.read(value)
            except Mistake as mistake:
                return self._wrong(path, str(mistake))
        size = note if isinstance(note, Size) else ANY
        if typing.get_origin(inner) is list:
            (item,) = typing.get_args(inner)
            return self._list(item, size, value, path)
        if typing.get_origin(inner) is dict:
            key, item = typing.get_args(inner)
            return self._dict(key, item, size, value, path)
        return self._mapping(inner, value, path)

    def _list(self, item: Any, size: Size, value: Any, path: Path) -> Any:
        if not isinstance(value, list):
            return self._wrong(path, "expected a list: each item on a line of its own after a dash, or [a, b].")
        if text := size.refusal(len(value)):
            return self._wrong(path, text)
        found = [self._value(item, one, (*path, index)) for index, one in enumerate(value)]
        return self._leave_out(path) if any(one is _NOTHING for one in found) else found

    def _dict(self, key: Any, item: Any, size: Size, value: Any, path: Path) -> Any:
        if not isinstance(value, dict):
            return self._wrong(path, _MAPPING)
        if text := size.refusal(len(value)):
            return self._wrong(path, text)
        found = {}
        for name, one in value.items():
            here = (*path, name)
            read = self._value(key, name, here), self._value(item, one, here)
            if _NOTHING not in read:
                found[read[0]] = read[1]
        return found

    def _wrong(self, path: Path, text: str) -> Any:
        self.mistakes.append((path, text))
        return self._leave_out(path)

    def _leave_out(self, path: Path) -> Any:
        self.left_out.append(path)
        return _NOTHING


@cache
def keys(kind: type[Any]) -> dict[str, Key]:
    """The keys of a mapping, as values spell them."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        camel(one.name): Key(
            one.name, _given(hints[one.name]), one.default is MISSING and one.default_factory is MISSING
        )
        for one in fields(kind)
    }


def mapping_in(hint: Any) -> type[Any] | None:
    """The mapping that a type is, or whose list it is; None of another."""
    if hasattr(hint, "__metadata__"):
        hint = hint.__origin__
    if typing.get_origin(hint) is list:
        return mapping_in(typing.get_args(hint)[0])
    return hint if is_dataclass(hint) and isinstance(hint, type) else None


def plain(value: Any) -> Any:
    """A mapping as plain values, of which it can be read again."""
    if is_dataclass(value):
        return {
            name: plain(one)
            for name, key in keys(type(value)).items()
            if (one := getattr(value, key.field)) is not None
        }
    return [plain(one) for one in value] if isinstance(value, list) else value


def _given(hint: Any) -> Any:
    """The T of `T | None`."""
    parts = typing.get_args(hint)
    return next(one for one in parts if one is not type(None)) if type(None) in parts else hint


def camel(name: str) -> str:
    """A field's name as a key.

    >>> camel("parameter_server_type")
    'parameterServerType'
    """
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)
