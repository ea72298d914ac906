"""The goodput of a run: every second by cause, with money where a price is known.

`core/goodput` computes the ledger. `goodput_of` turns it into rows, and `goodput_section` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from footplate.core.errors import ConfigError
from footplate.core.goodput import goodput
from footplate.reporting.charts import goodput_chart
from footplate.reporting.formats import NOTHING, duration, share
from footplate.reporting.html import Html, paragraph, section, table
from footplate.reporting.run_record import RunRecord


class LedgerRow(NamedTuple):
    """Seconds of one cause.

    Attributes:
        cause: its description.
        seconds: its duration.
        money: its price in dollars; None if no price is known.
    """

    cause: str
    seconds: float
    money: float | None = None


def goodput_of(run: RunRecord) -> list[LedgerRow]:
    """Return the ledger of a run. Empty without a monitor's record."""
    try:
        ledger = goodput(run.directory)
    except ConfigError:
        return []
    return [LedgerRow(entry.label, entry.seconds, entry.usd) for entry in ledger.entries]


def goodput_section(rows: Sequence[LedgerRow]) -> Html:
    """Draw the ledger: a bar, and a table whose last row is the sum."""
    title = "Goodput"
    if not rows:
        return section("goodput", title, paragraph("There is no goodput ledger of this run.", note=True))
    total_s = sum(row.seconds for row in rows)
    prices = [row.money for row in rows if row.money is not None]
    cells = [
        (row.cause, duration(row.seconds), share(row.seconds / total_s if total_s else None), _dollars(row.money))
        for row in rows
    ]
    total = ("sum", duration(total_s), share(1.0 if total_s else None), _dollars(sum(prices) if prices else None))
    chart = goodput_chart([(row.cause, row.seconds) for row in rows])
    return section(
        "goodput", title, paragraph("Every second of the run, by its cause."), chart.draw(),
        table(("cause", "time", "share", "price"), [*cells, total]),
    )  # fmt: skip


def _dollars(money: float | None) -> str:
    return NOTHING if money is None else f"${money:,.2f}"
