"""`footplate completion bash|zsh|fish|tcsh`: print a script that completes the commands and their options in a shell.

The script asks `footplate jobs list` for the names of jobs when you complete one. The options of `fit` come from the
trainer's signature, so this command imports torch. Write the script to a file once; don't run this command in each new
shell.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from footplate.cli.arguments import Parser, make_parser
from footplate.cli.jobs_watch import COMPLETE_NAMES

_LIST = """footplate jobs list --limit 0 --format json 2>/dev/null | sed -n 's/^    "jobId": "\\(.*\\)",$/\\1/p'"""
_NAMES = {
    "bash": f'{COMPLETE_NAMES}() {{ compgen -W "$({_LIST})" -- "$1"; }}',
    "zsh": f"{COMPLETE_NAMES}() {{ compadd -- $({_LIST}) }}",
    "fish": f"function {COMPLETE_NAMES}; {_LIST}; end",
}


def parser(name: str) -> Parser:
    """Make the parser of `completion`."""
    parser = make_parser(
        name,
        "Print a completion script. For bash: "
        "footplate completion bash > ~/.local/share/bash-completion/completions/footplate",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"), help="the shell")
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Print the script; returns the exit code."""
    from jsonargparse import ArgumentParser

    from footplate.cli.commands import COMMANDS

    shell = parser(name).parse_args(argv).shell
    top = ArgumentParser(prog="footplate")
    commands = top.add_subcommands()
    for command, about in COMMANDS.items():
        module = importlib.import_module(about.module)
        inner = module.parser(command)
        commands.add_subcommand(command, inner, help=about.help)

        # jsonargparse accepts a parser with actions only if they are added after the parser itself.
        if hasattr(module, "add_actions"):
            module.add_actions(inner)
    print(top.get_completion_script(f"shtab-{shell}", preambles=[_NAMES[shell]] if shell in _NAMES else []))
    return 0
