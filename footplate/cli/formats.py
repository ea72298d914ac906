"""Printing results: a table for people, or JSON or YAML for programs (`--format table|json|yaml`).

`--json` is a short form of `--format json`. The help doesn't list it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from rich.console import RenderableType

Format = Literal["table", "json", "yaml"]


def add_format(
    parser: Any,
    default: Format | None = "table",
    choices: Sequence[Format] = get_args(Format),
    help: str = "how to print the result",
) -> None:
    """Add `--format` and `--json` to a parser."""
    parser.add_argument("--format", choices=choices, default=default, help=help)
    parser.add_argument("--json", action="store_const", const="json", dest="format", help=argparse.SUPPRESS)


def show(drawing: RenderableType) -> None:
    """Print a drawing of rich, as wide as the terminal. A closed pipe raises BrokenPipeError, as for `print`."""
    from rich.console import Console

    console = Console()
    with console.capture() as capture:
        console.print(drawing)
    print(capture.get(), end="")


def write(value: Any, form: Literal["json", "yaml"]) -> str:
    """Write plain values as JSON or YAML, with a line break at the end."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if form == "json":
        return f"{text}\n"
    import yaml

    # Read from the JSON text, which has no enums, tuples, or shared lists: safe_dump refuses or marks them.
    return yaml.safe_dump(json.loads(text), sort_keys=False, allow_unicode=True, width=120)


def show_as(form: Format | None, value: Any, table: Callable[[], RenderableType | str]) -> None:
    """Print plain values as JSON or YAML, or else the result of `table`: a drawing of rich, or text."""
    if form in ("json", "yaml"):
        print(write(value, form), end="")
    else:
        drawing = table()
        if isinstance(drawing, str):
            print(drawing)
        else:
            show(drawing)


def grid(rows: Sequence[dict[str, Any]], columns: dict[str, str], wraps: str) -> RenderableType:
    """Draw rows as a table.

    Args:
        rows: the cells, by key.
        columns: the keys that are shown, and their headings.
        wraps: the column whose cells may be wrapped.
    """
    from rich import box
    from rich.table import Column
    from rich.table import Table as Grid
    from rich.text import Text

    right = {key for key in columns if any(type(row[key]) in (int, float) for row in rows)}
    heads = [
        Column(heading, justify="right" if key in right else "left", overflow="fold", no_wrap=key != wraps)
        for key, heading in columns.items()
    ]
    table = Grid(*heads, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(Text(_cell(row[key])) for key in columns))
    return table


def aligned(rows: Sequence[dict[str, Any]], columns: dict[str, str], width: int | None) -> str:
    """Align rows as lines of text. It is faster than `grid`, because it doesn't import rich.

    Args:
        rows: the cells, by key.
        columns: the keys that are shown, and their headings.
        width: lines are cut at this width; None cuts none.

    >>> print(aligned([{"a": "x", "b": 12}, {"a": "long", "b": None}], {"a": "name", "b": "count"}, 80))
    name  count
    x     12
    long
    """
    table = [list(columns.values()), *([_cell(row[key]) for key in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)
    return "\n".join(line if width is None or len(line) <= width else f"{line[: width - 1]}…" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
