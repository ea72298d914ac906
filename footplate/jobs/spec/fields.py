"""The types of a spec's values: text in a certain form, whole numbers, numbers, booleans, one of a few words.

Each type reads the values of YAML and of flags, a `Scalar` or text. For a wrong value, its message says what it expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any

from footplate.catalog.lookup import find_accelerator, find_machine
from footplate.core.errors import did_you_mean
from footplate.jobs.spec import naming
from footplate.jobs.spec.document import Scalar
from footplate.jobs.spec.reading import Form, Mistake

MAX_REPLICAS = 10_000


def _mistake(expected: str, value: Any) -> Mistake:
    shown = value.text if isinstance(value, Scalar) else value
    quoted = f'"{shown[:60]}"' if isinstance(shown, str) else "nothing" if shown is None else f"a {_kind(shown)}"
    return Mistake(f"{quoted}: {expected}.")


def _kind(value: Any) -> str:
    return {dict: "mapping", list: "list"}.get(type(value), type(value).__name__)


def text(form: Callable[[str], str]) -> Form:
    """Text in a certain form. A number counts as the text that the file has."""

    def read(value: Any) -> str:
        content = value.text if isinstance(value, Scalar) else value
        if not isinstance(content, str):
            raise _mistake("expected text", value)
        try:
            return form(content)
        except ValueError as error:
            # A ConfigError is a ValueError. The catalog raises it, and its text names the value already.
            text = str(error)
            raise (Mistake(text) if text.startswith('"') else _mistake(text, content)) from None

    return Form(read)


def whole(low: int, high: int) -> Form:
    """A whole number. JSON writes 64-bit integers as text, so digits in text are accepted, too."""

    def read(value: Any) -> int:
        number = value.value if isinstance(value, Scalar) else value
        if isinstance(number, str) and number.isascii() and number.isdigit() and len(number) < 20:
            number = int(number)
        if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
            raise _mistake(f"expected a whole number from {low} to {high}", value)
        return number

    return Form(read)


def _real(value: Any) -> float:
    """A number, also in forms that YAML reads as text, such as `1e-3`."""
    number = value.value if isinstance(value, Scalar) else value
    if isinstance(number, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", number[:100], re.ASCII):
        number = float(number)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or abs(number) > 1e300 or math.isnan(number):
        raise _mistake("expected a number", value)
    return float(number)


def _truth(value: Any) -> bool:
    answer = value.value if isinstance(value, Scalar) else value
    if not isinstance(answer, bool):
        raise _mistake("expected true or false", value)
    return answer


def one_of(*choices: str) -> Form:
    """One of the API's constants. Case and dashes don't matter, as with gcloud's flags."""

    def read(value: Any) -> str:
        choice = value.text if isinstance(value, Scalar) else value
        plain = choice.upper().replace("-", "_") if isinstance(choice, str) else choice
        if plain not in choices:
            near = (
                did_you_mean(str(plain)[:60], choices)
                if isinstance(plain, str)
                else f"Expected one of {', '.join(choices)}."
            )
            raise _mistake(f"not one of the choices. {near.removesuffix('.')}", value)
        return plain

    return Form(read)


def _machine(name: str) -> str:
    return find_machine(name).name


def _accelerator(name: str) -> str:
    return find_accelerator(name).name


Argument = Annotated[str, text(naming.argument)]
Plain = Annotated[str, text(naming.plain)]
Module = Annotated[str, text(naming.module)]
Location = Annotated[str, text(naming.location)]
Package = Annotated[str, text(naming.package)]
Image = Annotated[str, text(naming.image)]
Version = Annotated[str, text(naming.version)]
Duration = Annotated[str, text(naming.duration)]
JobName = Annotated[str, text(naming.job_name)]
MachineName = Annotated[str, text(_machine)]
AcceleratorName = Annotated[str, text(_accelerator)]
Count = Annotated[int, whole(0, MAX_REPLICAS)]
Trials = Annotated[int, whole(0, 1_000_000)]
Real = Annotated[float, Form(_real)]
Truth = Annotated[bool, Form(_truth)]
