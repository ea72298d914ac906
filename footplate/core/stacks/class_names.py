"""Names of functions with their classes, such as `Flowers.transform`, where faulthandler writes only `transform`.

They are those of the functions that the modules of this process hold. Nothing is read from a disk, which may hang as well.
No code of the user's runs, not even that of a proxy that says which class it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from footplate.core.stacks.snapshot import Frame


def modules_by_file() -> dict[str, ModuleType]:
    """Return the modules of this process by their files."""
    modules = [module for module in list(sys.modules.values()) if issubclass(type(module), ModuleType)]
    return {file: module for module in modules if type(file := vars(module).get("__file__")) is str}


def with_class(frame: Frame, module: ModuleType | None) -> Frame:
    """Return a frame whose function has the name of its class, too; as it is if the module has no such function.

    Args:
        frame: a call.
        module: the module of its file.
    """
    for code in () if module is None else _codes(module):
        here = (code.co_name, code.co_filename) == (frame.function, frame.file)
        if here and any(line == frame.line for _, _, line in code.co_lines()):
            return Frame(code.co_qualname, frame.file, frame.line)
    return frame


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """The functions of a module and of its classes, also those inside of classes and of decorators."""
    seen: set[int] = set()
    left: list[Any] = list(vars(module).values())
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        kind = type(item)
        if kind is FunctionType:
            yield item.__code__
            left.append(vars(item).get("__wrapped__"))
        elif issubclass(kind, (staticmethod, classmethod)):
            left.append(item.__func__)
        elif issubclass(kind, property):
            left.append(item.fget)
        elif issubclass(kind, functools.cached_property):
            left.append(item.func)
        elif issubclass(kind, type) and vars(item).get("__module__") == module.__name__:
            left += list(vars(item).values())
