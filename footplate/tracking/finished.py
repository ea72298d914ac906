"""Log finished runs to MLflow: a parent run and its child runs.

Each run gets an event queue, and one uploader process (`uploader.py`) delivers them all. Records that can't be
delivered stay in the directory, as for a training run.
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from footplate.tracking import event_queue
from footplate.tracking.attempt import CLOSE_TIMEOUT_S
from footplate.tracking.base import Status
from footplate.tracking.event_queue import Progress, Record
from footplate.tracking.mlflow import MLFLOW_STATUS, destination, versions
from footplate.tracking.parameters import flatten, without_credentials
from footplate.tracking.uploader import Uploader

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """A finished run.

    Attributes:
        name: its name in MLflow.
        began_s: start time in seconds since 1970.
        ended_s: end time in seconds since 1970.
        params: flat or nested.
        metrics: rows of (step, values by name).
        artifacts: files.
        tags: tags of the run.
        status: its final status.
    """

    name: str
    began_s: float
    ended_s: float
    params: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[tuple[int, Mapping[str, float]]] = ()
    artifacts: Sequence[Path] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    status: Status = "success"


def log_finished(
    directory: Path, experiment: str, run: Finished, children: Sequence[Finished] = (), tracking_uri: str | None = None
) -> bool:
    """Log a run with its children. The tracking URI is found in the same way as by `MLflow`.

    Args:
        directory: the run's directory; it exists. Undelivered records stay there for `deliver_pending`.
        experiment: the experiment's name.
        run: the parent run.
        children: its child runs.
        tracking_uri: a server or store.

    Returns:
        True if everything was delivered.
    """
    uri, artifacts = destination(tracking_uri, directory)
    home = {
        "uri": without_credentials(uri),
        "artifacts": artifacts and f"{artifacts}/{quote(experiment, safe='')}",
        "experiment": experiment,
    }

    parent_key = uuid.uuid4().hex
    runs = ((run, parent_key, None), *((child, uuid.uuid4().hex, parent_key) for child in children))
    for finished, key, parent in runs:
        event_queue.append(
            event_queue.next_queue(directory), _records(finished, {**home, "key": key, "parent": parent})
        )
    Uploader(directory, None, uri).close(CLOSE_TIMEOUT_S["success"])

    progress = Progress.load(directory)
    for note in progress.dropped:
        log.warning("MLflow refused %s", note)
    undelivered = event_queue.pending(directory)
    if undelivered:
        log.warning(
            "MLflow at %s did not receive all of %s (%s). The rest is in %s. Send it with "
            "footplate.tracking.mlflow.deliver_pending(%r).",
            home["uri"], run.name, progress.error or "it took too long", directory, str(directory),
        )  # fmt: skip
    return not undelivered


def _records(run: Finished, home: Mapping[str, Any]) -> list[Record]:
    began_ms, ended_ms = round(run.began_s * 1000), round(run.ended_s * 1000)
    start = {
        "kind": "start", "time_ms": began_ms, **home, "run_id": None, "resume_step": None, "run_name": run.name,
        "tags": {"mlflow.source.name": sys.argv[0], **run.tags}, "params": flatten(run.params),
    }  # fmt: skip
    return [
        start,
        *(
            {"kind": "metrics", "time_ms": ended_ms, "step": step, "values": dict(values)}
            for step, values in run.metrics
        ),
        *({"kind": "artifact", "time_ms": ended_ms, "path": str(path.resolve())} for path in run.artifacts),
        *([] if home["parent"] else [{"kind": "environment", "time_ms": ended_ms, "versions": versions()}]),
        {"kind": "end", "time_ms": ended_ms, "status": MLFLOW_STATUS[run.status]},
    ]
