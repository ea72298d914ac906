"""One result in three forms, for `--format table|json|yaml`: a table for people, the others for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from rich.console import RenderableType

Format = Literal["table", "json", "yaml"]


def add_format(made: Any, default: Format | None = "table") -> None:
    """Add `--format` to a parser, whether it is jsonargparse's or a plain one."""
    made.add_argument("--format", choices=get_args(Format), default=default, help="how to print it")


def show_as(form: Format | None, value: Any, table: Callable[[], RenderableType | str]) -> None:
    """Print plain values as JSON or YAML, or what `table` makes of them: a drawing, or text as it is."""
    if form == "json":
        print(json.dumps(value, indent=2, ensure_ascii=False))
    elif form == "yaml":
        import yaml

        print(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120), end="")
    else:
        from footplate.cli.show import show

        made = table()
        if isinstance(made, str):
            print(made)
        else:
            show(made)


def grid(rows: Sequence[dict[str, Any]], columns: dict[str, str], wraps: str) -> RenderableType:
    """Rows as a table; `columns` names the keys that are shown, and their headings; the column `wraps` may be cut up."""
    from rich import box
    from rich.table import Column
    from rich.table import Table as Grid
    from rich.text import Text

    right = {key for key in columns if any(type(row[key]) in (int, float) for row in rows)}
    heads = [
        Column(heading, justify="right" if key in right else "left", overflow="fold", no_wrap=key != wraps)
        for key, heading in columns.items()
    ]
    made = Grid(*heads, box=box.SIMPLE_HEAD)
    for row in rows:
        made.add_row(*(Text(_cell(row[key])) for key in columns))
    return made


def aligned(rows: Sequence[dict[str, Any]], columns: dict[str, str], width: int | None) -> str:
    """Rows as lines of text, for what is to be there at once: rich, which draws `grid`, takes its time to be imported.

    Args:
        rows: the cells by key.
        columns: which keys are shown, and their headings.
        width: of a line, which is cut there; None cuts none.

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
