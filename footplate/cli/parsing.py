"""jsonargparse, with readable errors, and with the user's failures kept apart from the user's mistakes.

jsonargparse imports the user's modules and constructs the user's objects, and takes whatever they raise for a wrong
argument. Here an exception of the user's code comes out as itself, and everything else as a `ConfigError`.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from footplate.cli.explain import explain
from footplate.core.errors import ConfigError, FootplateError


def make_parser(name: str, description: str) -> ArgumentParser:
    """The parser of the command `name`: no abbreviations, and no exit on a mistake."""
    return ArgumentParser(prog=f"footplate {name}", description=description, exit_on_error=False, allow_abbrev=False)


def add_backend(parser: ArgumentParser) -> None:
    """`--backend`, of the commands that start processes."""
    parser.add_argument(
        "--backend", type=Literal["local", "ray", "spark"], default="local", help="where: this machine, or a cluster"
    )


def parse(parser: ArgumentParser, argv: Sequence[str], classes: Mapping[str, Sequence[str]] | None = None) -> Namespace:
    """Parse the arguments of a command.

    Args:
        parser: from `make_parser`.
        argv: the arguments after the command's name.
        classes: for options that take classes, the short names they know.

    Raises:
        ConfigError: a mistake, explained.
        Exception: what a module of the user's raised when it was imported.
    """
    try:
        return parser.parse_args(list(argv))
    except ArgumentError as error:
        options = [option for action in parser._actions for option in action.option_strings]
        raised = _raised_by_import(error) or ConfigError(explain(str(error), options, classes or {}))
    raise raised


def instantiate(parser: ArgumentParser, config: Namespace) -> Namespace:
    """Construct the objects that a configuration describes.

    Raises:
        Exception: what a constructor raised.
    """
    try:
        return parser.instantiate(config, instantiators=[(_construct, object, True)])
    except _Carried as carried:
        raised = carried.error
    raise raised


class _Carried(BaseException):
    """Carries an exception of a constructor past jsonargparse, which catches `Exception`."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _construct(class_type: type[Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return class_type(*args, **kwargs)
    except Exception as error:
        raise _Carried(error) from error


def _raised_by_import(error: BaseException) -> BaseException | None:
    """What the body of the user's module raised, if that is what jsonargparse met; None if it met a mistake."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, (SyntaxError, FootplateError)) or any(frame.name == "<module>" for frame in frames):
        return error
    return None
