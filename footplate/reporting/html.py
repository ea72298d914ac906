"""HTML from values: every text is escaped, unless a function of this file made it.

>>> tag("p", "1 < 2")
'<p>1 &lt; 2</p>'
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

_VOID = frozenset({"img", "br", "input"})


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def escaped(value: Any) -> Html:
    """Escape a value, unless it is HTML already. Control characters, which HTML forbids, become a replacement character."""
    if isinstance(value, Html):
        return value
    text = "".join("\ufffd" if ord(letter) < 32 and letter not in "\n\t" else letter for letter in str(value))
    # A lone surrogate can't be encoded.
    return Html(html.escape(text.encode("utf-8", "replace").decode()))


def join(parts: Iterable[Any]) -> Html:
    """Join parts, escaped."""
    return Html("".join(map(escaped, parts)))


def tag(name: str, *children: Any, **attributes: Any) -> Html:
    """Make an element.

    Args:
        name: its name.
        children: its content; text is escaped.
        attributes: by name, with an underscore after a reserved word (`class_`) and for a dash (`aria_label`). True is an
            attribute without a value. None and False leave it out.
    """
    pairs = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{pairs}>" + ("" if name in _VOID else f"{join(children)}</{name}>"))


def paragraph(*children: Any, note: bool = False) -> Html:
    """Make a paragraph, or a note in a softer colour."""
    return tag("p", *children, class_="note" if note else None)


def facts(pairs: Iterable[tuple[str, Any]]) -> Html:
    """Make a list of names with values. Values that are None or empty are left out."""
    shown = [(name, value) for name, value in pairs if value is not None and value != ""]
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in shown))


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]], numbers: bool = True) -> Html:
    """Make a table that scrolls by itself if it is wide. The first cell of a row is its heading.

    Args:
        headings: one for each column.
        rows: the cells.
        numbers: align all columns but the first to the right.
    """
    head = tag("tr", *(tag("th", heading, scope="col") for heading in headings))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag(
        "div",
        tag("table", tag("thead", head), tag("tbody", *body), class_="numbers" if numbers else None),
        class_="wide", tabindex="0", role="region", aria_label=f"table: {', '.join(headings)}",
    )  # fmt: skip


def folded(summary: Any, *children: Any, open: bool = False) -> Html:
    """Make a part that opens on a click."""
    return tag("details", tag("summary", summary), *children, open=open)


def section(key: str, title: str, *children: Any) -> Html:
    """Make a section with a heading. `key` is its anchor."""
    return tag("section", tag("h2", title, id=f"{key}-title"), *children, id=key, aria_labelledby=f"{key}-title")
