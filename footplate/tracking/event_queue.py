"""The files by which a training process hands its records to the courier process that delivers them.

A **spool**, `mlflow-pending-N.jsonl` in the run's directory, is one attempt of a run: a line of JSON for each record,
the first of them a "start", the last, unless the attempt was killed, an "end". The training process appends, the
courier reads; a spool is deleted once all of it is delivered, so one that is left over is what a tracker missed.

The **progress**, `mlflow.json` beside it, is the courier's alone to write: the MLflow run it delivers to, how many
bytes of each spool are delivered, and what went wrong last. Both survive the death of either process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from footplate.tracking.files import append_whole, replace_text

PATTERN = "mlflow-pending-*.jsonl"
Record = dict[str, Any]


@dataclass(frozen=True)
class Progress:
    """What the courier has done so far.

    Attributes:
        key: which of our runs `run_id` belongs to.
        run_id: the MLflow run, once there is one.
        delivered: bytes delivered of each spool, by file name.
        error: why delivery fails at present; None while it works.
        dropped: what MLflow refused for good, and why.
    """

    key: str | None = None
    run_id: str | None = None
    delivered: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    dropped: tuple[str, ...] = ()

    @classmethod
    def load(cls, run_dir: Path) -> Progress:
        """The progress of a run's directory; an empty one where there is none."""
        try:
            fields = json.loads((run_dir / "mlflow.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        return cls(**{**fields, "dropped": tuple(fields["dropped"])})

    def save(self, run_dir: Path) -> None:
        """Write it whole, or leave the older."""
        replace_text(run_dir / "mlflow.json", json.dumps(asdict(self)) + "\n")

    def at(self, spool: Path, position: int) -> Progress:
        """With `position` bytes of `spool` delivered."""
        return replace(self, delivered={**self.delivered, spool.name: position}, error=None)

    def without(self, spool: Path) -> Progress:
        """With `spool` done and forgotten."""
        return replace(self, delivered={name: n for name, n in self.delivered.items() if name != spool.name})


def pending(run_dir: Path) -> list[Path]:
    """The spools that are not delivered yet, oldest first."""
    return sorted(run_dir.glob(PATTERN))


def next_spool(run_dir: Path) -> Path:
    """The name of a new attempt's spool: never used before, and sorted after all that are there."""
    last = max((int(path.stem.rpartition("-")[2]) for path in pending(run_dir)), default=0)
    return run_dir / PATTERN.replace("*", str(max(time.time_ns(), last + 1)))


def append(spool: Path, records: list[Record]) -> None:
    """Add records; all of them or, raising OSError, none."""
    append_whole(spool, "".join(json.dumps(record, default=float) + "\n" for record in records).encode())


def read(spool: Path, position: int) -> Iterator[tuple[Record, int]]:
    """The complete records from byte `position` on, each with the position after it."""
    with spool.open("rb") as file:
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):
                return
            position += len(line)
            yield json.loads(line), position


def first_record(spool: Path) -> Record | None:
    """The "start" of an attempt, if it was written before the attempt was killed."""
    return next((record for record, _ in read(spool, 0)), None)
