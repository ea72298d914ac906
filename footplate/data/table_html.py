"""A table in a notebook: its columns and types, its size, and its first rows if they cost almost nothing.

Displaying a table must not read it. So rows of a filter or a split aren't counted here, and rows that are far away, or that
are read only with all others of their row group, aren't shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from footplate.core import html
from footplate.data.preview import short

if TYPE_CHECKING:
    from footplate.data.table import Table

ROWS = 3
COLUMNS = 50


def to_html(table: Table) -> str:
    """Describe a table in HTML."""
    shown = list(table.schema)[:COLUMNS]
    rows = table.select([field.name for field in shown]).head(ROWS).to_pylist() if table.peeks else []
    header = ["column", "type", *(f"row {number}" for number in range(len(rows)))]
    lines = [[field.name, field.type, *(short(row[field.name]) for row in rows)] for field in shown]

    # The version of a table in memory is a hash of all its values.
    version = None if table.in_memory else table.version
    left_out = len(table.columns) - len(shown)
    counted = f"{table.num_rows:,}" if table.counts_at_once else "not counted yet; num_rows counts them"
    return html.card(
        f"Table {table.uri}",
        html.facts({"kind": table.kind, "version": version, "rows": counted}),
        html.grid(header, lines),
        html.notes([f"… and {left_out:,} more columns"] if left_out else []),
    )
