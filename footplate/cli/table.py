"""`footplate table PATH`: a table's columns, size and first rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser
    from rich.console import RenderableType

    from footplate.data.table import TableInfo

FIRST, SEPARATOR = "first rows", " · "


def parser(name: str) -> ArgumentParser:
    """The parser of `table`."""
    from footplate.cli.parsing import make_parser

    made = make_parser(name, "Show a table: Delta, Parquet, TFRecord or image files, here or in object storage.")
    made.add_argument("path", type=str, help="a path or URI, such as lake/flowers or s3://lake/flowers")
    made.add_argument(
        "--version", type=int | str | None, default=None, help="of a Delta table: a number or an ISO 8601 time"
    )
    made.add_argument("--rows", type=int, default=5, help="how many rows to show")
    made.add_argument("--json", action="store_true", help="print all as JSON")
    return made


def run(name: str, argv: Sequence[str]) -> int:
    """Describe a table; returns the exit code.

    Raises:
        FootplateError: a mistake in the arguments; there is no table, or not this version of it.
    """
    from footplate.cli.parsing import parse
    from footplate.data.table import Table

    given = parse(parser(name), argv)
    if given.rows < 0:
        raise ConfigError(f"--rows={given.rows}: expected a number of at least 0.")
    info = Table(given.path, version=given.version).describe(given.rows)
    if given.json:
        from footplate.cli.preview import plain

        print(json.dumps({**asdict(info), "sample": plain(info.sample)}, indent=2))
    else:
        from footplate.cli.show import show

        show(render(info))
    return 0


def render(info: TableInfo) -> RenderableType:
    """A table's description for a terminal: a line for each column, with its first values, as far as the line goes."""
    from rich import box
    from rich.console import Group
    from rich.table import Column
    from rich.table import Table as Grid
    from rich.text import Text

    from footplate.cli.preview import short
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
        cut = [Text(values, no_wrap=True, overflow="ellipsis")] if info.sample else []
        columns.add_row(Text(name), Text(kind), *cut)
    return Group(facts, columns, Text("" if info.num_rows else "no rows"))
