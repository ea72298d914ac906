"""The trackers that an uploader process delivers to, and the contract of a tracker's client.

A tracker is a service such as MLflow, W&B or Trackio. Its package is large, and its server may be slow or down, so only the
uploader process (`uploader.py`) imports the package and connects to the server. Each tracker has three parts:

    tracking/mlflow.py          the logger, in the training process: it makes records
    tracking/mlflow_client.py   the client, in the uploader process: it delivers records
    TRACKERS["mlflow"]          the names and variables that the processes share

A client is one of two kinds. If `confirms_each_batch`, a batch is stored when `deliver` returns. Otherwise the
tracker's own code sends records in the background, and they count as stored when `finish` returns. If it raises, or if
the process dies before, a new client gets all records since the last `finish` again, and must deliver none of them
twice.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from footplate.tracking.event_queue import Progress, Record

REQUEST_TIMEOUT_S = 20


class Delivery(Protocol):
    """A client: a connection to one tracker. It delivers to one run at a time.

    Attributes:
        run_id: the tracker's id of the run, after `start`.
        dropped: descriptions of the records that the tracker refused permanently.
        confirms_each_batch: see the module's docstring.
    """

    run_id: str
    dropped: list[str]
    confirms_each_batch: bool

    def __init__(self, uri: str, progress: Progress, run_dir: Path) -> None: ...

    def start(self, record: Record) -> None:
        """Find or create the run of a "start" record, and deliver to it from now on."""
        ...

    def batches(self, records: Iterable[tuple[Record, int]]) -> Iterator[tuple[list[Record], int]]:
        """Group records that are delivered together, with the position after each group."""
        ...

    def deliver(self, batch: list[Record]) -> None:
        """Deliver one batch. Raise if it may succeed later; list records in `dropped` that can't succeed."""
        ...

    def finish(self) -> None:
        """Close the run of a queue that has no writer any more. Raise if the tracker doesn't have all records."""
        ...

    def abandon(self) -> None:
        """Give a broken connection up, after an error of a client that doesn't confirm each batch. Never raises."""
        ...

    def state(self) -> dict[str, Any]:
        """Return plain values that the next client gets as `progress.state`."""
        ...


@dataclass(frozen=True)
class Tracker:
    """What the training process and the uploader must know alike of a tracker.

    Attributes:
        name: the beginning of its files' names, and of its modules in `footplate.tracking`.
        title: its name in messages.
        client: the class of its client, imported in the uploader.
        environment: variables of the uploader process.
        environment_defaults: variables of the uploader process that the user may set otherwise.
    """

    name: str
    title: str
    client: str
    environment: Mapping[str, str] = field(default_factory=dict)
    environment_defaults: Mapping[str, str] = field(default_factory=dict)

    def connect(self, uri: str, progress: Progress, run_dir: Path) -> Delivery:
        """Import the client and connect it."""
        return pkgutil.resolve_name(self.client)(uri, progress, run_dir)


MLFLOW = Tracker(
    "mlflow",
    "MLflow",
    "footplate.tracking.mlflow_client:MLflowDelivery",
    {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"},
    # The uploader has its own retries, so MLflow must fail soon if the tracker hangs.
    {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": str(REQUEST_TIMEOUT_S)},
)
WANDB = Tracker(
    "wandb",
    "W&B",
    "footplate.tracking.wandb_client:WandbDelivery",
    {"WANDB_ERROR_REPORTING": "false", "DO_NOT_TRACK": "true"},
    {"WANDB_SILENT": "true"},
)
TRACKIO = Tracker(
    "trackio",
    "Trackio",
    "footplate.tracking.trackio_client:TrackioDelivery",
    {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "true"},
)

TRACKERS = {tracker.name: tracker for tracker in (MLFLOW, WANDB, TRACKIO)}
