"""Delivery of records to W&B, in the uploader process. Only this process imports W&B.

W&B's own code sends rows in the background and says nothing when a row is lost. So the client counts:

- Each record of a run is a row with a number, W&B's `_step`: 0, 1, 2 … The step of the training is the metric
  `trainer/global_step`, which is the x axis of all charts.
- The rows of a queue count as delivered when the run is finished and the server says that it has the last number.
- If that fails, the next client sends the queue again. The server says which number it has last, and the client omits the
  rows up to this number. So no row is lost, and none is there twice.

A killed attempt may have logged steps that the resumed attempt repeats. The client keeps the last step of each metric
in its state, and omits the repeated points.
"""

from __future__ import annotations

import contextlib
import html
import json
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from footplate.core.optional import require
from footplate.tracking.event_queue import Progress, Record, note_dropped
from footplate.tracking.trackers import REQUEST_TIMEOUT_S

wandb: Any = require("wandb", "wandb", "Logging to W&B")

OFFLINE = "offline"
STEP = "trainer/global_step"
# After a finished run, a server may need some seconds until it counts the last rows.
CONFIRM_TIMEOUT_S = 20.0
# A server that doesn't answer must not keep the uploader for longer than this at the end of a queue.
FINISH_TIMEOUT_S = 60.0
LONGEST_RETRY_PAUSE_S = 10
KILLED = 255


class WandbDelivery:
    """A connection to W&B for one queue of one run.

    Attributes:
        run_id: the run's id, after `start`.
        dropped: records that can't be delivered.
    """

    confirms_each_batch = False

    def __init__(self, uri: str, progress: Progress, run_dir: Path) -> None:
        self._uri = uri
        self._run_dir = run_dir
        self._progress = progress
        self._run: Any = None
        # The number of the next row, and the first number that the server doesn't have.
        self._row = 0
        self._first_row = 0
        self._missing_from = 0
        # The last step of each metric, and what of it a resumed attempt repeats.
        self._reached: dict[str, int] = {}
        self._repeated: dict[str, int] = {}
        self._first_reached: dict[str, int] = {}
        self._exit_code = KILLED
        self._finished = False
        self.run_id = ""
        self.dropped = list(progress.dropped)

    def start(self, record: Record) -> None:
        """Open the run of a "start" record, and deliver to it from now on."""
        self.run_id = record["key"]
        known = self._progress.state if self._progress.state.get("key") == self.run_id else None
        if known and known.get("session"):
            # An uploader died while it wrote these files. They are written again.
            shutil.rmtree(known["session"], ignore_errors=True)

        self._run = self._open(record)
        self._missing_from = self._run.step
        self._row = self._first_row = known["rows"] if known else self._missing_from
        self._reached = dict(known["reached"]) if known else {}
        self._first_reached = dict(self._reached)
        self._repeated = {} if record["resume_step"] is None else dict(self._reached)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def batches(self, records: Iterable[tuple[Record, int]]) -> Iterator[tuple[list[Record], int]]:
        """Yield each record singly; W&B groups them."""
        for record, position in records:
            yield [record], position

    def deliver(self, batch: list[Record]) -> None:
        """Give a record to W&B."""
        (record,) = batch
        match record["kind"]:
            case "metrics":
                self._log(record, self._new_values(record))
            case "media":
                self._log(record, self._new_values({**record, "values": {record["key"]: record}}))
            case "end":
                self._exit_code = record["exit_code"]

    def finish(self) -> None:
        """End the run, and wait until the server says that it has all rows.

        Raises:
            RuntimeError: the server doesn't have them.
        """
        if not self._finished:
            self._run.finish(exit_code=self._exit_code)
            self._finished = True
        if self._uri != OFFLINE and self._row > self._missing_from:
            self._confirm()

    def abandon(self) -> None:
        """End W&B's own process with everything that it hasn't sent."""
        with contextlib.suppress(Exception):
            session = Path(self._run.settings.sync_dir)
            wandb.teardown(exit_code=1)
            if self._uri == OFFLINE:
                shutil.rmtree(session, ignore_errors=True)

    def state(self) -> dict[str, Any]:
        """The run's position: at the queue's end after `finish`, else at its beginning."""
        if self._finished:
            return {"key": self.run_id, "rows": self._row, "reached": self._reached}
        session = self._run.settings.sync_dir if self._uri == OFFLINE else None
        return {"key": self.run_id, "rows": self._first_row, "reached": self._first_reached, "session": session}

    def _open(self, record: Record) -> Any:
        """Open or create the run. Raises if the server doesn't answer."""
        offline = self._uri == OFFLINE
        server: dict[str, Any] = {} if offline else {"base_url": self._uri}
        settings = wandb.Settings(
            **server,
            init_timeout=REQUEST_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
            x_graphql_retry_max=1,
            x_graphql_timeout_seconds=REQUEST_TIMEOUT_S,
            x_file_stream_timeout_seconds=REQUEST_TIMEOUT_S,
            # A server that is back gets its rows within the time limit of `finish`.
            x_file_stream_retry_wait_max_seconds=LONGEST_RETRY_PAUSE_S,
            # The uploader isn't the training process: its output, machine load and code say nothing about the run.
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        # W&B merges these parameters with those of a resumed run.
        return wandb.init(
            id=self.run_id, resume=None if offline else "allow", mode="offline" if offline else "online",
            project=record["project"], entity=record["entity"], name=record["run_name"], group=record["group"],
            tags=record["tags"], notes=record["notes"], config=record["params"] or None,
            dir=self._run_dir, settings=settings,
        )  # fmt: skip

    def _new_values(self, record: Record) -> dict[str, Any]:
        """Return the values that no earlier attempt has logged at this step or later, and note them."""
        step = record["step"]
        values = {name: value for name, value in record["values"].items() if step > self._repeated.get(name, -1)}
        for name in values:
            self._reached[name] = max(step, self._reached.get(name, -1))
        return values

    def _log(self, record: Record, values: dict[str, Any]) -> None:
        """Log a row, unless the server has it. A value whose file is gone is dropped, but its row counts."""
        if not values:
            return
        if self._row >= self._missing_from:
            converted = {name: self._convert(value) for name, value in values.items()}
            timestamp = record["time_ms"] / 1000
            self._run.log({**converted, STEP: record["step"], "_timestamp": timestamp}, step=self._row, commit=True)
        self._row += 1

    def _convert(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        try:
            return _media(value)
        except (OSError, ValueError) as error:
            note_dropped(self.dropped, f"{value['media']} {value['key']}", error)
            return None

    def _confirm(self) -> None:
        api = wandb.Api(overrides={"base_url": self._uri}, timeout=REQUEST_TIMEOUT_S)
        path = f"{self._run.entity}/{self._run.project}/{self.run_id}"
        deadline = time.monotonic() + CONFIRM_TIMEOUT_S
        while True:
            has = api.run(path).lastHistoryStep + 1
            if has >= self._row:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server has {has} of the {self._row} rows of {path}")
            time.sleep(1)


def _media(record: Record) -> Any:
    """Make W&B's object for a file."""
    path = Path(record["path"])
    match record["media"]:
        case "image" | "figure":
            return wandb.Image(str(path), caption=record["caption"])
        case "histogram":
            content = json.loads(path.read_text())
            return wandb.Histogram(np_histogram=(content["counts"], content["edges"]))
        case "table":
            content = json.loads(path.read_text())
            return wandb.Table(columns=content["columns"], data=content["data"])
        case _:
            return wandb.Html(f"<pre>{html.escape(path.read_text())}</pre>")
