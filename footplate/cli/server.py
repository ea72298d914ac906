"""`footplate server`: jobs over HTTP, and a page to watch them on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.core.errors import ConfigError
from footplate.server.serving import PORT

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def parser(name: str) -> ArgumentParser:
    """The parser of `server`."""
    from footplate.cli.parsing import make_parser

    made = make_parser(name, "Serve the verbs of `footplate jobs` over HTTP, and a web page of jobs, until Ctrl-C.")
    made.add_argument("--host", type=str, default="127.0.0.1", help="the address to listen on; others need a token")
    made.add_argument("--port", type=int, default=PORT, help="the port; 0 for one that is free")
    made.add_argument(
        "--token-file", type=str | None, default=None, help="a file with the token that requests must bring"
    )
    return made


def run(name: str, argv: Sequence[str]) -> int:
    """Serve.

    Raises:
        FootplateError: a mistake in the arguments; it can't listen there, or others could ask without a token.
        SystemExit: 0, after SIGTERM.
        KeyboardInterrupt: after Ctrl-C.
    """
    from footplate.cli.parsing import parse
    from footplate.server.serving import serve

    given = parse(parser(name), argv)
    if not 0 <= given.port < 2**16:
        raise ConfigError(f"--port {given.port}: expected a number from 0 to 65535.")
    serve(given.host, given.port, Path(given.token_file) if given.token_file else None)
    return 0
