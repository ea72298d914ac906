"""One result in three forms, for `--format table|json|yaml`: a table for people, the others for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser
    from rich.console import RenderableType

Format = Literal["table", "json", "yaml"]


def add_format(made: ArgumentParser, default: Format = "table") -> None:
    """Add `--format` to a parser."""
    made.add_argument("--format", type=Format, default=default, help="how to print it")


def show_as(form: Format, value: Any, table: Callable[[], RenderableType | str]) -> None:
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


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
