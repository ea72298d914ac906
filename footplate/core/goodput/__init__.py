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
"""

from footplate.core.goodput.causes import Cause
from footplate.core.goodput.ledger import ledger
from footplate.core.goodput.monitor_file import NAME, MonitorFile, Session, read_rows, read_sessions
from footplate.core.goodput.result import AttemptEntry, Entry, Ledger
from footplate.core.goodput.run_ledger import goodput
from footplate.core.goodput.stretches import Stretch

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
    "ledger",
    "read_rows",
    "read_sessions",
]
