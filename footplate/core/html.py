"""Small HTML tables for notebooks, which `_repr_html_` returns.

    card("Table flowers", facts({"rows": "1,000"}), grid(["column", "type"], [["label", "int64"]]))

All text is escaped. The HTML has no scripts, and loads nothing. It sets no colors, so that it has those of the page, which
may be dark or light.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import PurePath
from urllib.parse import quote

_LEFT = ' style="text-align: left"'


def card(title: str, *parts: str) -> str:
    """Put a title above several parts.

    Args:
        title: the title, as plain text.
        parts: HTML from the other functions of this file. Empty parts are left out.
    """
    return "\n".join([f"<div>\n<strong>{escape(title)}</strong>", *filter(None, parts), "</div>"])


def facts(values: Mapping[str, object]) -> str:
    """Make a table with a line for each name and its value. Values that are None or empty are left out."""
    lines = [
        f"<tr><th{_LEFT}>{escape(name)}</th><td{_LEFT}>{escape(str(value))}</td></tr>"
        for name, value in values.items()
        if value not in (None, "")
    ]
    return "\n".join(["<table>", *lines, "</table>"]) if lines else ""


def grid(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Make a table with a header and rows."""
    names = "".join(f"<th{_LEFT}>{escape(name)}</th>" for name in header)
    lines = ["".join(f"<td{_LEFT}>{escape(str(cell))}</td>" for cell in row) for row in rows]
    return "\n".join(["<table>", f"<tr>{names}</tr>", *(f"<tr>{line}</tr>" for line in lines), "</table>"])


def notes(sentences: Iterable[str]) -> str:
    """Put each sentence on a line of its own, in small print."""
    text = "<br>\n".join(map(escape, sentences))
    return f"<small>{text}</small>" if text else ""


def preformatted(text: str) -> str:
    """Keep the spaces and the line breaks of a text."""
    return f"<pre>{escape(text)}</pre>" if text else ""


def link(path: PurePath) -> str:
    """Link to a file. A notebook opens a relative path from its own folder."""
    return f'<a href="{quote(path.as_posix())}" target="_blank">{escape(str(path))}</a>'


def progress(done: float, total: float) -> str:
    """Make a bar that is filled to `done` of `total`."""
    return f'<progress value="{done:.0f}" max="{total:.0f}"></progress>'
