"""The forms of a verb: a form that waits, a form that returns a handle, and both in place.

A verb is written once, as a function that returns an `Operation`. Its forms have the same arguments:

    allreduce_async  = begun("allreduce_async", _allreduce, …)              ->  a handle
    allreduce_async_ = begun("allreduce_async_", in_place(_allreduce), …)   ->  a handle
    allreduce_       = done("allreduce_", in_place(_allreduce), …)          ->  the result
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from footplate.compat.horovod.engine import Handle
from footplate.compat.horovod.submit import Operation

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def begun(name: str, verb: Callable[Arguments, Operation[Result]], doc: str) -> Callable[Arguments, Handle[Result]]:
    """Make the form of a verb that returns a handle."""

    def form(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Handle[Result]:
        return verb(*args, **kwargs).submit()

    return _named_form(name, doc, form, verb)


def done(name: str, verb: Callable[Arguments, Operation[Result]], doc: str) -> Callable[Arguments, Result]:
    """Make the form of a verb that waits."""

    def form(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return verb(*args, **kwargs).result()

    return _named_form(name, doc, form, verb)


def in_place(verb: Callable[Arguments, Operation[Result]]) -> Callable[Arguments, Operation[Result]]:
    """Make a verb that writes its results into its inputs."""

    @functools.wraps(verb)
    def changed(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Operation[Result]:
        return verb(*args, **kwargs).in_place()

    return changed


def _named_form(name: str, doc: str, form: Any, verb: Callable[..., Any]) -> Any:
    form.__name__ = form.__qualname__ = name
    form.__module__, form.__doc__ = __package__, doc
    form.__signature__ = inspect.signature(verb).replace(return_annotation=inspect.Signature.empty)
    return form
