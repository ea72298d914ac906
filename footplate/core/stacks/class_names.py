"""Names of functions with their classes, such as `Flowers.transform`, where faulthandler writes only `transform`.

They are those of the methods that the modules of this process hold. Nothing is read from a disk, which may hang as well.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from footplate.core.stacks.snapshot import Frame


def modules_by_file() -> dict[str, ModuleType]:
    """Return the modules of this process by their files."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return {file: module for module in modules if isinstance(file := vars(module).get("__file__"), str)}


def with_class(frame: Frame, module: ModuleType | None) -> Frame:
    """Return a frame whose function has the name of its class, too; as it is if the module has no such method.

    Args:
        frame: a call.
        module: the module of its file.
    """
    for code in () if module is None else _methods(module):
        if code.co_name == frame.function and any(line == frame.line for _, _, line in code.co_lines()):
            return Frame(code.co_qualname, frame.file, frame.line)
    return frame


def _methods(module: ModuleType) -> Iterator[CodeType]:
    """The methods of a module's classes, also of those inside of classes."""
    seen: set[type] = set()
    left: list[Any] = list(vars(module).values())
    while left:
        kind = left.pop()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and kind not in seen:
            seen.add(kind)
            members = list(vars(kind).values())
            left += members
            yield from (inspect.unwrap(function).__code__ for function in map(_function, members) if function)


def _function(member: Any) -> FunctionType | None:
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    elif isinstance(member, functools.cached_property):
        member = member.func
    return member if isinstance(member, FunctionType) else None
