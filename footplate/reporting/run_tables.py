"""The tables of a run: which they were, and the same versions of them, opened again.

A checkpoint records the training table, with its filter, split and version. `TableDataModule` logs all of its tables as
hyper-parameters, such as `val_table: lake/flowers@12`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from footplate.core.errors import FootplateError
from footplate.data.table import Table
from footplate.reporting.run_record import RunRecord

_SUFFIX = "_table"


def table_names(run: RunRecord) -> dict[str, str]:
    """Return the tables that a run names, by their use: "train", "val", …, as `uri@version`."""
    return {
        name.removesuffix(_SUFFIX): value
        for name, value in run.hparams.items()
        if name.endswith(_SUFFIX) and isinstance(value, str) and "@" in value
    }


def open_table(name: str) -> Table:
    """Open the table of `uri@version`.

    Raises:
        FootplateError: it is gone, or was in memory.
    """
    uri, _, version = name.rpartition("@")
    # The version of anything but a Delta table is a hash of its content.
    return Table(uri, version=int(version) if version.isdecimal() else None)


def training_tables(run: RunRecord) -> list[dict[str, Any]]:
    """Return the records of the training tables, from the newest checkpoint; see `Table.record`."""
    loaders = run.state.get("steps", {}).get("loaders", [])
    parts = [part for loader in loaders for part in loader.get("parts", [loader])]
    records: dict[str, dict[str, Any]] = {}
    for part in parts:
        record = part.get("table")
        if isinstance(record, Mapping):
            records.setdefault(str(record), dict(record))
    return list(records.values())


def tables_of(run: RunRecord) -> list[tuple[str, Table | str]]:
    """Open the tables of a run.

    Returns:
        The use of each table, and the table; or a sentence, if it can't be opened.
    """
    opened: list[tuple[str, Table | str]] = []
    for record in training_tables(run):
        opened.append(("train", _attempt(lambda record=record: Table.reopen(record))))
    for use, name in table_names(run).items():
        if use == "train" and opened:
            continue
        opened.append((use, _attempt(lambda name=name: open_table(name))))
    return opened


def _attempt(open_it: Any) -> Table | str:
    try:
        return open_it()
    except FootplateError as error:
        return str(error)
    except Exception as error:  # a file system's own error
        return f"{type(error).__name__}: {error}"
