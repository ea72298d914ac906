"""Find the object inside a function, or inside any value, that can't be pickled.

    train → global `config` (Config) → attribute `db` (sqlite3.Connection)

The search tries: it pickles the parts of an object that can't be pickled one by one, and continues in the first part that
can't be pickled either. That takes time, and happens only after pickling has failed.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_DEPTH = 20


def culprit(fn: Callable[..., Any], args: tuple[Any, ...] = ()) -> str:
    """Find the path from a function and its arguments to the innermost object that can't be pickled."""
    path = [name_of(fn)]
    bad = _first_bad([*_labelled(fn), *((f"argument {number}", arg) for number, arg in enumerate(args, 1))])
    while bad is not None:
        label, part = bad
        path.append(f"{label} ({_type_of(part)})")
        bad = _first_bad(_parts(part)) if len(path) < MAX_DEPTH else None
    return " → ".join(path)


def name_of(fn: Callable[..., Any]) -> str:
    """The name of a function.

    >>> name_of(functools.partial(print, 1))
    'print'
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", None) or type(fn).__name__


def _first_bad(parts: Any) -> tuple[str, Any] | None:
    return next((part for part in parts if not _can_be_pickled(part[1])), None)


class _NullFile:
    def write(self, data: Any) -> int:
        return len(data)


def _can_be_pickled(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.Pickler(_NullFile()).dump(value)
    except Exception:
        return False
    return True


def _labelled(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The parts of a function, each with a label. For a partial function, also its arguments."""
    while isinstance(fn, functools.partial):
        yield from ((f"argument {number}", arg) for number, arg in enumerate(fn.args, 1))
        yield from ((f"argument `{name}`", arg) for name, arg in fn.keywords.items())
        fn = fn.func
    yield from _parts(fn)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The objects that are pickled with a value, each with a label."""
    if isinstance(value, functools.partial):
        yield from _labelled(value)
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, types.MethodType):
        yield "its object", value.__self__
        yield from _parts(value.__func__)
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    else:
        yield from ((f"attribute `{name}`", part) for name, part in _state(value).items())


def _parts_of_function(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield f"closure `{name}`", cell.cell_contents
        except ValueError:
            # The closure's variable isn't assigned yet.
            continue
    for name in sorted(_names(fn.__code__) & fn.__globals__.keys()):
        if fn.__globals__[name] is not fn:
            yield f"global `{name}`", fn.__globals__[name]
    defaults = fn.__defaults__ or ()
    last = fn.__code__.co_varnames[: fn.__code__.co_argcount][fn.__code__.co_argcount - len(defaults) :]
    yield from ((f"default of `{name}`", part) for name, part in zip(last, defaults, strict=True))
    yield from ((f"default of `{name}`", part) for name, part in (fn.__kwdefaults__ or {}).items())
    yield from ((f"attribute `{name}`", part) for name, part in vars(fn).items())


def _names(code: types.CodeType) -> set[str]:
    """The globals that a function's code may use, and that of the functions in it."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    instructions = dis.get_instructions(code)
    own = {instruction.argval for instruction in instructions if instruction.opname.endswith("_GLOBAL")}
    return own.union(*map(_names, inner))


def _state(value: Any) -> dict[str, Any]:
    """The attributes that are pickled with an object, or with a class that is pickled by value."""
    if isinstance(value, type):
        return {name: part for name, part in vars(value).items() if not isinstance(part, types.GetSetDescriptorType)}
    try:
        state = value.__getstate__()
    except Exception:
        return {}
    if isinstance(state, tuple):
        # A class with slots has (dictionary or None, dictionary of the slots).
        parts = [part for part in state if isinstance(part, dict)]
        state = {name: value for part in parts for name, value in part.items()}
    return state if isinstance(state, dict) else {}


def _type_of(value: Any) -> str:
    kind = type(value)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
