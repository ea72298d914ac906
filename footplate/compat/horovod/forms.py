"""The forms of a verb: one that waits, one that returns a handle, and both in place.

A verb is written once, as a function from its arguments to an `Operation`. Its forms take the same arguments:

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

Given = ParamSpec("Given")
Result = TypeVar("Result")


def begun(name: str, verb: Callable[Given, Operation[Result]], doc: str) -> Callable[Given, Handle[Result]]:
    """The form of a verb that doesn't wait."""

    def form(*args: Given.args, **kwargs: Given.kwargs) -> Handle[Result]:
        return verb(*args, **kwargs).submit()

    return _called(name, doc, form, verb)


def done(name: str, verb: Callable[Given, Operation[Result]], doc: str) -> Callable[Given, Result]:
    """The form of a verb that waits."""

    def form(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        return verb(*args, **kwargs).result()

    return _called(name, doc, form, verb)


def in_place(verb: Callable[Given, Operation[Result]]) -> Callable[Given, Operation[Result]]:
    """A verb whose results go into its inputs."""

    @functools.wraps(verb)
    def changed(*args: Given.args, **kwargs: Given.kwargs) -> Operation[Result]:
        return verb(*args, **kwargs).in_place()

    return changed


def _called(name: str, doc: str, form: Any, verb: Callable[..., Any]) -> Any:
    form.__name__ = form.__qualname__ = name
    form.__module__, form.__doc__ = __package__, doc
    form.__signature__ = inspect.signature(verb).replace(return_annotation=inspect.Signature.empty)
    return form
