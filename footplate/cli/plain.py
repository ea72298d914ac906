"""argparse alone, for commands whose options are words, and which people wait for: it is there at once.

jsonargparse knows types and classes, which `fit` needs; importing it and making a parser takes longer than all that
`jobs submit` does. This is as much of its interface as `jobs` uses, so that the same functions make a parser of either
kind: a plain one to parse with, and one of jsonargparse's where all commands go into one completion script.

What is given lies flat in one namespace, whichever action it is of.
"""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from footplate.core.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """A parser that raises a `ConfigError` for a mistake, explained."""

    def error(self, message: str) -> NoReturn:
        from footplate.cli.explain import explain

        raise ConfigError(explain(message, self._options(), {}))

    def _options(self) -> list[str]:
        """Its own options, and those of its actions."""
        inner = [one for action in self._actions if isinstance(action.choices, dict) for one in action.choices.values()]
        own = [option for action in self._actions for option in action.option_strings]
        return [*own, *(option for parser in inner for option in parser._options())]

    def add_subcommands(self, dest: str) -> Actions:
        """Have actions, of which one must be given."""
        return Actions(self.add_subparsers(dest=dest, required=True, metavar=dest))


class Actions:
    """The actions of a command."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def add_subcommand(self, name: str, parser: Parser, help: str) -> Parser:
        """Add one, with the options of `parser`; returns its parser, to which more may be added."""
        return self._made.add_parser(
            name, parents=[parser], add_help=False, allow_abbrev=False, prog=parser.prog,
            description=parser.description, help=help,
        )  # fmt: skip


def make(kind: Any, name: str, description: str) -> Any:
    """The parser of the command `name`, of a kind: this one, or jsonargparse's; no abbreviations."""
    return kind(prog=f"footplate {name}", description=description, allow_abbrev=False)
