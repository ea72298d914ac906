"""Arguments of the commands that take words and numbers: argparse, with Footplate's error messages and help.

`fit`, `validate`, `test` and `predict` take classes and configuration files, which jsonargparse reads (`fit_arguments`).
All other commands use this parser: argparse is imported at once, and jsonargparse takes longer than all that `jobs submit`
does.

A command with actions (`footplate checkpoint inspect`) has the arguments of the chosen action in the same flat namespace.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from footplate.core.errors import ConfigError, did_you_mean

_TYPES = {"int": "an integer", "float": "a number"}

# A message lists at most this many choices. Of more choices it names the nearest.
_MAX_CHOICES = 4


class _HelpFormatter(argparse.HelpFormatter):
    """Adds the type of numbers, and the default, to the help of an option."""

    def _get_help_string(self, action: argparse.Action) -> str:
        notes = []
        if action.type in (int, float):
            notes.append(f"type: {action.type.__name__}")
        if action.default is not None and action.default is not False and action.default != argparse.SUPPRESS:
            notes.append(f"default: {action.default}")
        return f"{action.help} ({', '.join(notes)})" if notes else action.help or ""


class Parser(argparse.ArgumentParser):
    """A parser that raises a `ConfigError` for a mistake in the arguments."""

    # jsonargparse asks parsers for this attribute when it writes a completion script.
    _subcommands_action = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _HelpFormatter, **settings})

    def error(self, message: str) -> NoReturn:
        choices = {action.metavar or action.dest: list(action.choices) for action in self._actions if action.choices}
        raise ConfigError(explain(message, self._options(), choices))

    def _parse_optional(self, arg_string: str) -> Any:
        return super()._parse_optional(known_spelling(arg_string, self._option_string_actions))

    def _options(self) -> list[str]:
        """List its own options, and those of its actions."""
        options = [option for action in self._actions for option in action.option_strings]
        for action in self._actions:
            if isinstance(action.choices, dict):
                options += [option for parser in action.choices.values() for option in parser._options()]
        return options

    def add_subcommands(self, dest: str) -> Actions:
        """Add actions, of which the user must give one."""
        return Actions(self.add_subparsers(dest=dest, required=True, metavar=dest))


class Actions:
    """The actions of a command."""

    def __init__(self, subparsers: Any) -> None:
        self._subparsers = subparsers

    def add_subcommand(self, name: str, parser: Parser, help: str) -> Parser:
        """Add an action with the arguments of `parser`; returns the parser of the action."""
        return self._subparsers.add_parser(
            name, parents=[parser], add_help=False, allow_abbrev=False, prog=parser.prog,
            description=parser.description, help=help,
        )  # fmt: skip


def make_parser(name: str, description: str) -> Parser:
    """Make the parser of the command `name`. It accepts no abbreviations."""
    return Parser(prog=f"footplate {name}", description=description, allow_abbrev=False)


def known_spelling(argument: str, known: Container[str]) -> str:
    """Spell an option as the parser knows it: some tools write `--job-dir`, and others `--job_dir`.

    Args:
        argument: an argument of the command line, such as "--job_dir=runs".
        known: the option strings of the parser.
    """
    option, equals, value = argument.partition("=")
    if not option.startswith("--") or option in known:
        return argument
    words = option.removeprefix("--")
    for spelling in (f"--{words.replace('_', '-')}", f"--{words.replace('-', '_')}"):
        if spelling in known:
            return f"{spelling}{equals}{value}"
    return argument


def add_backend(parser: Parser) -> None:
    """Add `--backend`, for commands that start processes."""
    from footplate.launch.backends import NAMES

    parser.add_argument("--backend", choices=NAMES, default="local", help="where to run: this machine, or a cluster")


def explain(message: str, options: Iterable[str], choices: Mapping[Any, Sequence[Any]] | None = None) -> str:
    """Turn an error of argparse into one or two sentences.

    Args:
        message: the text of the error.
        options: all option strings, such as "--epochs", for suggestions.
        choices: the choices of arguments that have some, by their names.
    """
    names = option_names(options)
    if match := re.match(r"unrecognized arguments: (\S+)", message):
        return _unknown_option(match[1], names)
    if match := re.match(r"the following arguments are required: (.+)", message):
        return _missing(match[1].split(", ")[0], names, choices or {})
    if match := re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)\Z", message, re.S):
        return _invalid_choice(match[1].lstrip("-"), match[2], re.findall("'([^']*)'", match[3]))
    if match := re.match(r"argument (\S+): invalid (int|float) value: '(.*)'\Z", message, re.S):
        return f'{match[1].lstrip("-")}="{match[3]}": expected {_TYPES[match[2]]}.'
    return " ".join(message.split()).removeprefix("argument ")


def option_names(options: Iterable[str]) -> list[str]:
    """Sort the long options, without their dashes."""
    return sorted({option.strip("-+") for option in options if option.startswith("--")})


def nearest_option(name: str, names: list[str], dashes: str = "") -> str:
    """Suggest the option nearest to `name` in its group; the list of all options would be too long."""
    group, dot, last = name.rpartition(".")
    prefix = group + dot
    siblings = [option.removeprefix(prefix) for option in names if option.startswith(prefix)]
    hint = did_you_mean(last, siblings)
    if not hint.startswith("Did you mean"):
        return " See --help."
    nearest = hint.split('"')[1]
    return f' Did you mean "{dashes}{prefix}{nearest}"?'


def _unknown_option(word: str, names: list[str]) -> str:
    if not word.startswith("-"):
        return f'"{word}" follows no option. See --help.'
    option = word.partition("=")[0].strip("-+")
    return f"--{option}: there is no such option.{nearest_option(option, names, '--')}"


def _missing(name: str, names: list[str], choices: Mapping[Any, Sequence[Any]]) -> str:
    if name in choices:
        return f"{name}: not given. Expected one of: {', '.join(choices[name])}."
    if name in names:
        return f"{name}: not given. Give it with --{name}, or in a configuration file."
    return f"{name}: not given. See --help."


def _invalid_choice(name: str, value: str, choices: list[str]) -> str:
    if len(choices) > _MAX_CHOICES:
        return f'"{value}" is none of the choices of {name}. {did_you_mean(value, choices)}'
    quoted = [f'"{choice}"' for choice in choices]
    return f'{name}="{value}": expected {" or ".join(quoted)}.'
