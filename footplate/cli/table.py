"""`footplate table PATH`: show the columns, the size and the first rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from footplate.cli.arguments import Parser, make_parser
from footplate.cli.formats import add_format, show_as
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from footplate.data.table import TableInfo

FIRST, SEPARATOR = "first rows", " · "


def parser(name: str) -> Parser:
    """Make the parser of `table`."""
    parser = make_parser(name, "Show a table: Delta, Parquet, TFRecord or image files, here or in object storage.")
    parser.add_argument("path", help="a path or URI, such as lake/flowers or s3://lake/flowers")
    parser.add_argument("--version", help="the version of a Delta table: a number or an ISO 8601 time")
    parser.add_argument("--rows", type=int, default=5, help="the number of rows to show")
    add_format(parser)
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Describe a table; returns the exit code.

    Raises:
        FootplateError: a mistake in the arguments; the table or its version doesn't exist.
    """
    args = parser(name).parse_args(argv)
    if args.rows < 0:
        raise ConfigError(f"--rows={args.rows}: expected a number of at least 0.")

    from footplate.data.preview import plain
    from footplate.data.table import Table

    info = Table(args.path, version=_version(args.version)).describe(args.rows)
    show_as(args.format, {**asdict(info), "sample": plain(info.sample)}, lambda: render(info))
    return 0


def _version(text: str | None) -> int | str | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return text


def render(info: TableInfo) -> RenderableType:
    """Draw the description of a table: facts, then a line for each column with as many first values as fit."""
    from rich import box
    from rich.console import Group
    from rich.table import Column
    from rich.table import Table as Grid
    from rich.text import Text

    from footplate.data.preview import short
    from footplate.hardware.machine import readable_size

    facts = Grid.grid(padding=(0, 2))
    for name, value in {
        "table": info.uri,
        "kind": info.kind,
        "version": str(info.version),
        "rows": f"{info.num_rows:,}",
        "files": f"{info.num_files:,}",
        "row groups": f"{info.num_row_groups:,}",
        "size": f"{info.nbytes:,} bytes in memory"
        + (f" ({readable_size(info.nbytes)})" if info.nbytes >= 2**20 else ""),
    }.items():
        facts.add_row(Text(name, style="cyan"), Text(value))

    columns = Grid(Column("column", no_wrap=True), "type", *([FIRST] if info.sample else []), box=box.SIMPLE_HEAD)
    for name, kind in info.columns.items():
        values = SEPARATOR.join(short(row[name]) for row in info.sample)
        sample = [Text(values, no_wrap=True, overflow="ellipsis")] if info.sample else []
        columns.add_row(Text(name), Text(kind), *sample)
    return Group(facts, columns, Text("" if info.num_rows else "no rows"))
