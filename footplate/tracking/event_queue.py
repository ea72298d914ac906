"""The event queue between a training process and its uploader process: files in the run's directory.

An **event queue**, such as `mlflow-pending-N.jsonl`, belongs to one tracker and to one attempt of a run. It has a line
of JSON for each record. The first record is a "start". The last is an "end", unless the attempt was killed. The
training process appends and the uploader reads. The uploader deletes a queue when all of it is delivered, so a queue
that remains holds records that the tracker has not received.

Values that aren't floats, such as images, are files in a folder beside the queue, `mlflow-files-N`. A record names its
file. The folder is deleted with the queue.

The **progress**, such as `mlflow.json`, is written by the uploader only: the tracker's run, the number of delivered
bytes of each queue, and the last error. All these files survive the death of either process.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from footplate.tracking.file_moves import append_whole, replace_text
from footplate.tracking.parameters import without_credentials

DEFAULT = "mlflow"
# A tracker that refuses everything must not fill the progress file.
MOST_NOTES = 20
LONGEST_NOTE = 300
Record = dict[str, Any]


@dataclass(frozen=True)
class Progress:
    """The uploader's progress.

    Attributes:
        key: the key of the Footplate run that `run_id` belongs to.
        run_id: the tracker's run, when there is one.
        delivered: delivered bytes of each queue, by file name.
        error: why the delivery currently fails; None if it works.
        dropped: records that the tracker refused permanently, with the reason.
        state: values that the tracker's client needs when it starts again.
    """

    key: str | None = None
    run_id: str | None = None
    delivered: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    dropped: tuple[str, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, run_dir: Path, tracker: str = DEFAULT) -> Progress:
        """Load a tracker's progress in a run's directory; an empty one if there is none."""
        try:
            fields = json.loads((run_dir / f"{tracker}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        return cls(**{**fields, "dropped": tuple(fields["dropped"])})

    def save(self, run_dir: Path, tracker: str = DEFAULT) -> None:
        """Replace the progress file atomically."""
        fields = asdict(self)
        if not self.state:
            del fields["state"]
        replace_text(run_dir / f"{tracker}.json", json.dumps(fields) + "\n")

    def at(self, queue: Path, position: int) -> Progress:
        """Return a copy with `position` bytes of `queue` delivered."""
        return replace(self, delivered={**self.delivered, queue.name: position}, error=None)

    def without(self, queue: Path) -> Progress:
        """Return a copy without `queue`, which is done."""
        return replace(self, delivered={name: n for name, n in self.delivered.items() if name != queue.name})


def pending(run_dir: Path, tracker: str = DEFAULT) -> list[Path]:
    """List the queues with undelivered records, the oldest first."""
    return sorted(run_dir.glob(f"{tracker}-pending-*.jsonl"))


def next_queue(run_dir: Path, tracker: str = DEFAULT) -> Path:
    """Return a new path for an attempt's queue. It sorts after all existing queues."""
    last = max((int(_number(path)) for path in pending(run_dir, tracker)), default=0)
    return run_dir / f"{tracker}-pending-{max(time.time_ns(), last + 1)}.jsonl"


def files_of(queue: Path) -> Path:
    """Return the folder of a queue's files."""
    return queue.with_name(f"{queue.name.partition('-pending-')[0]}-files-{_number(queue)}")


def remove(queue: Path) -> None:
    """Delete a queue with its files."""
    shutil.rmtree(files_of(queue), ignore_errors=True)
    queue.unlink()


def append(queue: Path, records: list[Record]) -> None:
    """Append records. If it raises OSError, no record was added."""
    append_whole(queue, "".join(json.dumps(record, default=float) + "\n" for record in records).encode())


def read(queue: Path, position: int) -> Iterator[tuple[Record, int]]:
    """Yield the complete records from byte `position` on, each with the position after it."""
    with queue.open("rb") as file:
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):
                return
            position += len(line)
            yield json.loads(line), position


def first_record(queue: Path) -> Record | None:
    """Return the "start" record of an attempt; None if the attempt was killed before it wrote one."""
    return next((record for record, _ in read(queue, 0)), None)


def _number(queue: Path) -> str:
    return queue.stem.rpartition("-")[2]


def note_dropped(dropped: list[str], what: str, error: Exception) -> None:
    """Add a record that can't be delivered, with the reason, to the notes of a client."""
    note = without_credentials(f"{what}: {error}")[:LONGEST_NOTE]
    if note not in dropped and len(dropped) < MOST_NOTES:
        dropped.append(note)
