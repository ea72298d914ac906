"""The goodput ledger: every second of a job or a run, by cause.

    causes.py         the causes
    monitor_file.py   read monitor.jsonl, the record of a trainer, into sessions of training
    stretches.py      stretches of time: waiting, processes of an attempt, pauses between attempts
    ledger.py         the pure function: stretches and sessions → seconds by cause
    result.py         the result: entries, attempts, steps trained again, money
    run_ledger.py     the ledger of a run's directory, without a job
    text.py           the result as a table for a terminal

Goodput is the share of the time in which training steps were made that count: no later attempt made them again. The
time of a job comes from the store of jobs (`footplate/jobs/goodput.py`).

Importing this package imports none of its modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from footplate.core.lazy_import import lazy

if TYPE_CHECKING:
    from footplate.core.goodput.causes import Cause as Cause
    from footplate.core.goodput.monitor_file import NAME as NAME
    from footplate.core.goodput.monitor_file import MonitorFile as MonitorFile
    from footplate.core.goodput.monitor_file import Session as Session
    from footplate.core.goodput.monitor_file import read_rows as read_rows
    from footplate.core.goodput.monitor_file import read_sessions as read_sessions
    from footplate.core.goodput.result import AttemptEntry as AttemptEntry
    from footplate.core.goodput.result import Entry as Entry
    from footplate.core.goodput.result import Ledger as Ledger
    from footplate.core.goodput.run_ledger import goodput as goodput
    from footplate.core.goodput.stretches import Stretch as Stretch

_HOMES = {
    "Cause": "footplate.core.goodput.causes",
    "NAME": "footplate.core.goodput.monitor_file",
    "MonitorFile": "footplate.core.goodput.monitor_file",
    "Session": "footplate.core.goodput.monitor_file",
    "read_rows": "footplate.core.goodput.monitor_file",
    "read_sessions": "footplate.core.goodput.monitor_file",
    "AttemptEntry": "footplate.core.goodput.result",
    "Entry": "footplate.core.goodput.result",
    "Ledger": "footplate.core.goodput.result",
    "goodput": "footplate.core.goodput.run_ledger",
    "Stretch": "footplate.core.goodput.stretches",
}

__all__ = [
    "NAME",
    "AttemptEntry",
    "Cause",
    "Entry",
    "Ledger",
    "MonitorFile",
    "Session",
    "Stretch",
    "goodput",
    "read_rows",
    "read_sessions",
]

__getattr__ = lazy(__name__, _HOMES)
