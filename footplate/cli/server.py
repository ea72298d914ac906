"""`footplate server`: serve jobs over HTTP, with a web page to watch them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from footplate.cli.arguments import Parser, make_parser
from footplate.core.errors import ConfigError
from footplate.server.serving import PORT


def parser(name: str) -> Parser:
    """Make the parser of `server`."""
    parser = make_parser(name, "Serve the actions of `footplate jobs` over HTTP, and a web page of jobs, until Ctrl-C.")
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on; an address other than loopback needs a token"
    )
    parser.add_argument("--port", type=int, default=PORT, help="the port; 0 chooses a free one")
    parser.add_argument("--token-file", help="a file with the token that every request must carry")
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Serve until the process is stopped.

    Raises:
        FootplateError: a mistake in the arguments; the server can't listen there, or needs a token.
        SystemExit: 0, after SIGTERM.
        KeyboardInterrupt: after Ctrl-C.
    """
    from footplate.server.serving import serve

    args = parser(name).parse_args(argv)
    if not 0 <= args.port < 2**16:
        raise ConfigError(f"--port {args.port}: expected a number from 0 to 65535.")
    serve(args.host, args.port, Path(args.token_file) if args.token_file else None)
    return 0
