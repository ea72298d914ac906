"""Delivery of records to Trackio, in the uploader process. Only this process imports Trackio.

Each record becomes a row. The row's id is made of the attempt and of the record's place in its queue. Trackio ignores a row
whose id it has. So after a failure the client sends the same rows again, and none is there twice.

A killed attempt may have logged steps that the resumed attempt repeats. The client keeps the last step of each metric in
its state, and omits the repeated points.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from footplate.tracking.batching import batched
from footplate.tracking.event_queue import Progress, Record, note_dropped
from footplate.tracking.trackio_stores import Row, Store, open_store, trackio

MOST_VALUES = 1000


class TrackioDelivery:
    """A connection to Trackio's directory, or to a server. It delivers to one run at a time.

    Attributes:
        run_id: the run's id, after `start`.
        dropped: records that can't be delivered.
    """

    confirms_each_batch = True

    def __init__(self, uri: str, progress: Progress, run_dir: Path) -> None:
        self._store: Store = open_store(uri)
        self._known = progress.state
        self._run: dict[str, Any] = {}
        self._project = ""
        self._attempt = ""
        self._config: dict[str, Any] | None = None
        # The last step of each metric, and what of it a resumed attempt repeats.
        self._reached: dict[str, int] = {}
        self._repeated: dict[str, int] = {}
        self.run_id = ""
        self.dropped = list(progress.dropped)

    def start(self, record: Record) -> None:
        """Deliver to the run of a "start" record from now on.

        Raises:
            ValueError: Trackio doesn't allow the project's name.
        """
        trackio("sqlite_storage").SQLiteStorage.validate_project_name(record["project"])
        self.run_id = record["key"]
        self._run = record["run"]
        self._project = record["project"]
        self._attempt = record["attempt"]
        self._config = _config(record) if record["params"] is not None else None

        known = self._known if self._known.get("key") == self.run_id else {"reached": {}, "repeated": {}}
        self._reached = dict(known["reached"])
        if known.get("attempt") == self._attempt:
            # Another uploader has begun with this attempt.
            self._repeated = dict(known["repeated"])
        else:
            self._repeated = {} if record["resume_step"] is None else dict(self._reached)
        self._known = self.state()

    def batches(self, records: Iterable[tuple[Record, int]]) -> Iterator[tuple[list[Record], int]]:
        """Group records, each with its position in the queue, which is a part of its row's id."""
        placed = (({**record, "position": position}, position) for record, position in records)
        return batched(placed, MOST_VALUES)

    def deliver(self, batch: list[Record]) -> None:
        """Store the rows of a batch."""
        reached = dict(self._reached)
        rows = [row for record in batch if (row := self._row(record, reached)) is not None]
        if rows:
            rows[0]["config"] = self._config
            self._store.add(rows)
            self._config = None
        self._reached = reached
        self._known = self.state()

    def finish(self) -> None:
        """Do nothing: Trackio knows no end of a run."""

    def abandon(self) -> None:
        """Do nothing: every batch is confirmed."""

    def state(self) -> dict[str, Any]:
        """Return the run, and what its next attempt needs to omit repeated steps."""
        return {
            "key": self.run_id,
            "run": self._run,
            "attempt": self._attempt,
            "reached": self._reached,
            "repeated": self._repeated,
        }

    def _row(self, record: Record, reached: dict[str, int]) -> Row | None:
        """Make the row of a record; None if it has no new values. Notes in `reached` how far its metrics are."""
        match record["kind"]:
            case "metrics":
                values = record["values"]
            case "media":
                values = {record["key"]: record}
            case _:
                return None
        step = record["step"]
        values = {name: value for name, value in values.items() if step > self._repeated.get(name, -1)}
        if not values:
            return None
        reached.update({name: max(step, reached.get(name, -1)) for name in values})
        row: Row = {
            "project": self._project,
            "run": self._run["name"],
            "run_id": self.run_id,
            "step": step,
            "timestamp": datetime.fromtimestamp(record["time_ms"] / 1000, UTC).isoformat(),
            "config": None,
            "log_id": f"{self._attempt}-{record['position']}",
        }
        row["metrics"] = {_allowed(name): self._convert(value, row) for name, value in values.items()}
        return row

    def _convert(self, value: Any, row: Row) -> Any:
        """Convert a value. One whose file is gone is dropped, but its name stays in the row."""
        if not isinstance(value, dict):
            return value
        try:
            return self._media(value, row)
        except FileNotFoundError as error:
            note_dropped(self.dropped, f"{value['media']} {value['key']}", error)
            return None

    def _media(self, record: Record, row: Row) -> Any:
        """Make Trackio's form of a file, and store a picture."""
        path = Path(record["path"])
        match record["media"]:
            case "image" | "figure":
                name = f"{row['log_id']}{path.suffix}"
                self._store.add_file(path, name, row)
                place = f"{trackio('utils').canonical_project_name(row['project'])}/{row['run']}/{row['step']}/{name}"
                return {"_type": trackio().Image.TYPE, "file_path": place, "caption": record["caption"]}
            case "histogram":
                content = json.loads(path.read_text())
                return trackio().Histogram(np_histogram=(content["counts"], content["edges"]))._to_dict()
            case "table":
                content = json.loads(path.read_text())
                table = trackio().Table(columns=content["columns"], data=content["data"])
                return table._to_dict(row["project"], row["run"], row["step"])
            case _:
                return trackio().Markdown(_as_code(path.read_text()))._to_dict()


def _config(record: Record) -> dict[str, Any]:
    """Return the parameters with Trackio's own, whose names begin with an underscore."""
    params = {name.lstrip("_") or name: value for name, value in record["params"].items()}
    return {**params, "_Username": None, "_Created": record["run"]["created"], "_Group": record["group"]}


def _allowed(name: str) -> str:
    """Rename a metric as Trackio does, if Trackio has a field of this name."""
    return f"__{name}" if name in trackio("utils").RESERVED_KEYS or name.startswith("__") else name


def _as_code(text: str) -> str:
    """Write a text as a block of code in Markdown, so that it is shown as it is."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
