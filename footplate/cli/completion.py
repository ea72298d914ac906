"""`footplate completion bash|zsh|tcsh`: prints a script by which a shell completes the commands and their options.

Names of jobs are asked for when they are wanted. The options of `fit` come from the trainer's signature, so writing the
script imports torch: put it into a file once.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from footplate.cli.jobs_watch import COMPLETE_NAMES

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_LIST = """footplate jobs list --limit 0 --format json 2>/dev/null | sed -n 's/^    "jobId": "\\(.*\\)",$/\\1/p'"""
_NAMES = {
    "bash": f'{COMPLETE_NAMES}() {{ compgen -W "$({_LIST})" -- "$1"; }}',
    "zsh": f"{COMPLETE_NAMES}() {{ compadd -- $({_LIST}) }}",
}


def parser(name: str) -> ArgumentParser:
    """The parser of `completion`."""
    from footplate.cli.parsing import make_parser

    made = make_parser(
        name,
        "Print a completion script. For bash: "
        "footplate completion bash > ~/.local/share/bash-completion/completions/footplate",
    )
    made.add_argument("shell", type=Literal["bash", "zsh", "tcsh"], help="which shell")
    return made


def run(name: str, argv: Sequence[str]) -> int:
    """Print the script; returns the exit code."""
    from jsonargparse import ArgumentParser

    from footplate.cli.commands import COMMANDS
    from footplate.cli.parsing import parse

    shell = parse(parser(name), argv).shell
    top = ArgumentParser(prog="footplate")
    commands = top.add_subcommands()
    for command, about in COMMANDS.items():
        module = importlib.import_module(about.module)
        parser_of_it = module.parser(command)
        if not isinstance(parser_of_it, ArgumentParser):  # a plain one
            parser_of_it = module.parser(command, ArgumentParser)
        commands.add_subcommand(command, parser_of_it, help=about.help)
        if hasattr(module, "add_actions"):  # only once their command has its place
            module.add_actions(parser_of_it)
    print(top.get_completion_script(f"shtab-{shell}", preambles=[_NAMES[shell]] if shell in _NAMES else []))
    return 0
