"""`footplate report RUN [RUN…]`: write a report about runs as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from footplate.cli.arguments import Parser, make_parser
from footplate.core.errors import ConfigError


def parser(name: str) -> Parser:
    """Make the parser of `report`."""
    parser = make_parser(
        name,
        "Write a report about a run as one HTML file that needs no network: curves, where the time went, advice, data, "
        "predictions with their pictures, and the command to repeat the run. Several runs are shown side by side.",
    )
    parser.add_argument("runs", nargs="+", metavar="run", help="the directory of a run")
    parser.add_argument(
        "--output", metavar="FILE", help="the file to write; by default report.html in the directory of a single run"
    )
    parser.add_argument(
        "--no-data",
        action="store_true",
        help="don't read the tables of the runs: no statistics, no pictures from tables",
    )
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Write the report; returns the exit code.

    Raises:
        FootplateError: a mistake in the arguments; a directory without a run; plotly isn't installed.
    """
    args = parser(name).parse_args(argv)
    if len(args.runs) > 1 and args.output is None:
        raise ConfigError("--output: not given. A report of several runs needs a file, such as --output report.html.")
    if args.output is not None and not Path(args.output).absolute().parent.is_dir():
        raise ConfigError(f"--output={args.output}: its directory doesn't exist.")
    if args.output is not None and Path(args.output).is_dir():
        raise ConfigError(f"--output={args.output}: this is a directory. Give the name of a file.")

    from footplate.reporting.report import report

    path = report(*args.runs, output=args.output, data=not args.no_data)
    print(path)
    return 0
