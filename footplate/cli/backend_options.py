"""`--backend` of the commands that submit jobs, and the options of each backend."""

from __future__ import annotations

import sys
from argparse import Namespace

from footplate.cli.arguments import Parser
from footplate.core.errors import ConfigError
from footplate.jobs.backends import OPTIONS


def add_backend(command: Parser, help: str, names: tuple[str, ...] = tuple(OPTIONS)) -> None:
    """Add `--backend`, and the options of the backends.

    Args:
        command: the parser.
        help: the text for `--backend`.
        names: the backends to choose from.
    """
    command.add_argument("--backend", choices=list(names), default="local", help=help)
    for backend in names:
        for option, about in OPTIONS[backend].items():
            command.add_argument(f"--{option}", help=f"for --backend {backend}: {about}")


def backend_options(parsed: Namespace) -> dict[str, str]:
    """The options of the chosen backend. Other commands accept gcloud's `--project` and ignore it, so this does too.

    Raises:
        ConfigError: an option belongs to another backend.
    """
    values = {}
    for backend, options in OPTIONS.items():
        for option in options:
            value = getattr(parsed, option.replace("-", "_"), None)
            if value is not None and option == "project" and backend != parsed.backend:
                print(f"--project is ignored: it is for --backend {backend}.", file=sys.stderr)
                continue
            if value is not None and backend != parsed.backend:
                raise ConfigError(f"--{option} is for --backend {backend}: give that, too, or leave it out.")
            if value is not None:
                values[option] = value
    return values
