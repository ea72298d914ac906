"""Arguments of `fit`, `validate`, `test` and `predict`: jsonargparse, with readable errors.

jsonargparse imports the user's modules and constructs the user's objects. It reports whatever they raise as a wrong
argument. This file keeps the two apart: an exception of the user's code comes out as itself, and a mistake in the arguments
as a `ConfigError`. `explain` shortens the text of a mistake.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from footplate.cli.arguments import known_spelling
from footplate.cli.class_types import SHORT_NAMES
from footplate.cli.explain import explain
from footplate.core.errors import ConfigError, FootplateError


class _Parser(ArgumentParser):
    """Accepts `--trainer.max-epochs`, too."""

    def _parse_optional(self, arg_string: str) -> Any:
        return super()._parse_optional(known_spelling(arg_string, self._option_string_actions))


def make_parser(name: str, description: str) -> ArgumentParser:
    """Make the parser of the command `name`. It accepts no abbreviations, and raises on a mistake."""
    return _Parser(prog=f"footplate {name}", description=description, exit_on_error=False, allow_abbrev=False)


def parse(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """Parse the arguments of a command.

    Args:
        parser: the parser, from `make_parser`.
        argv: the arguments after the command's name.

    Raises:
        ConfigError: there is a mistake in the arguments.
        Exception: a module of the user raised it when it was imported.
    """
    try:
        return parser.parse_args(list(argv))
    except ArgumentError as error:
        options = [option for action in parser._actions for option in action.option_strings]
        failure = _raised_by_import(error) or ConfigError(explain(str(error), options, SHORT_NAMES))

    # Outside of the except block, so that the traceback doesn't show jsonargparse's error too.
    raise failure


def instantiate(parser: ArgumentParser, config: Namespace) -> Namespace:
    """Construct the objects that a configuration describes.

    Raises:
        Exception: a constructor raised it.
    """
    try:
        return parser.instantiate(config, instantiators=[(_construct, object, True)])
    except _ConstructorError as carrier:
        failure = carrier.error
    raise failure


class _ConstructorError(BaseException):
    """Carries an exception of a constructor through jsonargparse, which catches `Exception`."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _construct(class_type: type[Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return class_type(*args, **kwargs)
    except Exception as error:
        raise _ConstructorError(error) from error


def _raised_by_import(error: BaseException) -> BaseException | None:
    """Return the exception that the import of a user's module raised; None if there is none behind `error`."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, (SyntaxError, FootplateError)) or any(frame.name == "<module>" for frame in frames):
        return error
    return None
