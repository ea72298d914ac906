"""Arguments of the trainer from the environment, as in Lightning: `PL_TRAINER_MAX_EPOCHS=3` is `max_epochs=3`.

A variable gives an argument that the program leaves out. Its text is read as a Python literal if it is one.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Mapping
from typing import Any

PREFIX = "PL_TRAINER_"

log = logging.getLogger(__name__)


def arguments(environ: Mapping[str, str], names: set[str]) -> dict[str, Any]:
    """Return the arguments that variables give. Warn of a variable that names no argument. Empty variables are ignored."""
    values = {}
    for variable, text in environ.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or not text:
            continue
        if name in names:
            values[name] = _value(text)
        else:
            log.warning("%s is ignored: Trainer has no argument %s.", variable, name)
    return values


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
