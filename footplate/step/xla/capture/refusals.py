"""Errors of the capture, with the line of the user's code.

A captured step runs with tensors that have a shape and no values. Code that needs a value (`if loss > 1`,
`loss.item()`, `x[mask]`) can't be recorded as a graph. A number that only Python knows would be recorded as a constant.
Both are refused during capture, before anything is compiled.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import torch

from footplate.core.errors import FootplateError

_FOOTPLATE = str(Path(__file__).parents[3]) + "/"
# The demo is a user's program.
_DEMO = _FOOTPLATE + "demo/"
_NOT_THE_USERS = (str(Path(torch.__file__).parent), _FOOTPLATE, "<")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_NEEDS_VALUES = {
    "DataDependentOutputException": "asks for the value of a tensor",
    "GuardOnDataDependentSymNode": "branches on the value of a tensor",
    "DynamicOutputShapeException": "makes a tensor whose shape depends on values",
}
_NEEDS_VALUES_TEXTS = ("tracing tensor", "data-dependent", "numpy() on", ".numpy() is not supported", "data_ptr")
_CHECKS = "aten._linalg_check_errors"


class CaptureError(FootplateError):
    """A step that can't be captured as one program. The text names the line and the alternative."""


def _is_theirs(filename: str) -> bool:
    is_theirs = filename.startswith(_DEMO) or not filename.startswith(_NOT_THE_USERS)
    return is_theirs and "contextlib" not in filename


def place(filename: str, line: int) -> str:
    """A line of code as errors show it: `model.py:12: if loss > 1:`."""
    return f"{filename}:{line}: {linecache.getline(filename, line).strip()}"


def calling_place() -> str:
    """The innermost line of the user's code on the stack."""
    return places_within(None)[0] or "an unknown place"


def places_within(function: CodeType | None) -> tuple[str | None, str | None]:
    """The innermost line of the user's code that a function has called, and the innermost one outside of packages.

    The second one calls a library's model. It is the first one if all lines are in installed packages.
    """
    frame: FrameType | None = sys._getframe(1)
    innermost = None
    while frame is not None and frame.f_code is not function:
        filename = frame.f_code.co_filename
        if _is_theirs(filename):
            line = place(filename, frame.f_lineno)
            innermost = innermost or line
            if not any(folder in filename for folder in _INSTALLED):
                return innermost, line
        frame = frame.f_back
    return innermost, innermost


def raising_place(error: BaseException) -> str:
    """The innermost line of the user's code that an error came through."""
    for entry in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_theirs(entry.filename):
            return place(entry.filename, entry.lineno or 0)
    return "an unknown place"


@contextmanager
def explained(step_name: str) -> Iterator[None]:
    """Turn torch's errors about missing values into a `CaptureError`; let all others pass.

    Args:
        step_name: the step that is captured, such as `"Classifier.training_step"`.
    """
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        if _CHECKS in str(error):
            raise CaptureError(
                f"{step_name} calls a function of torch.linalg that raises when a matrix has no inverse (inv, solve, "
                "cholesky):\n"
                f'    {raising_place(error)}\nXLA\'s table doesn\'t have these. Train with accelerator="cpu" or "cuda", or '
                "compute without them."
            ) from error
        reason = _reason(error)
        if reason is None:
            raise
        raise CaptureError(
            f"{step_name} {reason}, which a captured step can't know:\n    {raising_place(error)}\n"
            "Keep the choice in tensors (torch.where, a mask that is multiplied in, a shape that is always the same), "
            'or train with accelerator="cpu" or "cuda", which run the step line by line.'
        ) from error


def _reason(error: BaseException) -> str | None:
    for cause in _causes(error):
        named = _NEEDS_VALUES.get(type(cause).__name__)
        if named is not None:
            return named
        if isinstance(cause, RuntimeError) and any(text in str(cause) for text in _NEEDS_VALUES_TEXTS):
            return "asks for the value of a tensor"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
