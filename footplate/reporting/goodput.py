"""The goodput of a run: every second by cause, with money where a price is known.

`core/goodput` computes the ledger. If the run belongs to a job of this machine, its ledger is the job's: with the time in
the queue, and with the price of the job's machines. `ledger_of` turns it into rows. `goodput_section` draws those of one
run, and `goodputs_section` those of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from footplate.core.errors import ConfigError
from footplate.core.goodput import goodput
from footplate.jobs.goodput import ledger_of_run
from footplate.reporting.charts import goodput_chart
from footplate.reporting.formats import NOTHING, duration, share
from footplate.reporting.html import Html, paragraph, section, table
from footplate.reporting.run_record import RunRecord

TITLE = "Goodput"


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


@dataclass(frozen=True)
class RunLedger:
    """The ledger of a run.

    Attributes:
        rows: its causes.
        goodput: the share of training steps that count; None if it is unknown.
        of: whose time it is, as the end of a sentence.
        machine: the machines that the price is for; empty without a price.
    """

    rows: tuple[LedgerRow, ...] = ()
    goodput: float | None = None
    of: str = "of the run"
    machine: str = ""

    @property
    def seconds(self) -> float:
        """All time."""
        return sum(row.seconds for row in self.rows)

    @property
    def money(self) -> float | None:
        """The price of all time; None if no price is known."""
        prices = [row.money for row in self.rows if row.money is not None]
        return sum(prices) if prices else None


def ledger_of(run: RunRecord) -> RunLedger:
    """Return the ledger of a run. It has no rows without a monitor's record."""
    job = run.monitor.last.start.job if run.monitor.last is not None else None
    ledger, of = None, "of the run"
    if job is not None:
        ledger = ledger_of_run(job)
        of = f"of the job {job.rpartition('-')[0]}, from its submission" if ledger is not None else of
    if ledger is None:
        try:
            ledger = goodput(run.directory)
        except ConfigError:
            return RunLedger()
    rows = tuple(LedgerRow(entry.label, entry.seconds, entry.usd) for entry in ledger.entries)
    return RunLedger(rows, ledger.goodput, of, ledger.machine)


def goodput_section(ledger: RunLedger) -> Html:
    """Draw the ledger of a run: a bar, and a table whose last row is the sum."""
    if not ledger.rows:
        return section("goodput", TITLE, paragraph("There is no goodput ledger of this run.", note=True))
    cells = [
        (row.cause, duration(row.seconds), _share(row.seconds, ledger), _dollars(row.money)) for row in ledger.rows
    ]
    total = ("sum", duration(ledger.seconds), _share(ledger.seconds, ledger), _dollars(ledger.money))
    grid = table(("cause", "time", "share", "price"), [*cells, total])
    return section(
        "goodput", TITLE, paragraph(f"Every second {ledger.of}, by its cause."),
        goodput_chart([("time", _spent(ledger))]).draw(), grid,
        paragraph(f"Price: {ledger.machine}.", note=True) if ledger.machine else "",
    )  # fmt: skip


def goodputs_section(ledgers: Sequence[tuple[str, RunLedger]]) -> Html:
    """Draw the ledgers of several runs: a bar for each, and a table with a column for each."""
    known = [(name, ledger) for name, ledger in ledgers if ledger.rows]
    if not known:
        return section("goodput", TITLE, paragraph("There is no goodput ledger of these runs.", note=True))
    spent = [dict(_spent(ledger)) for _, ledger in known]
    rows = [
        (
            cause,
            *(
                f"{duration(of_run[cause])} ({_share(of_run[cause], ledger)})" if cause in of_run else NOTHING
                for of_run, (_, ledger) in zip(spent, known, strict=True)
            ),
        )
        for cause in dict.fromkeys(cause for of_run in spent for cause in of_run)
    ]
    rows.append(("sum", *(duration(ledger.seconds) for _, ledger in known)))
    if any(ledger.money is not None for _, ledger in known):
        rows.append(("price", *(_dollars(ledger.money) for _, ledger in known)))
    rows.append(("goodput", *(share(ledger.goodput) for _, ledger in known)))
    return section(
        "goodput", TITLE, goodput_chart([(name, _spent(ledger)) for name, ledger in known]).draw(),
        table(("cause", *(name for name, _ in known)), rows),
    )  # fmt: skip


def _spent(ledger: RunLedger) -> list[tuple[str, float]]:
    return [(row.cause, row.seconds) for row in ledger.rows]


def _share(seconds: float, ledger: RunLedger) -> str:
    return share(seconds / ledger.seconds if ledger.seconds else None)


def _dollars(money: float | None) -> str:
    return NOTHING if money is None else f"${money:,.2f}"
