"""Runs that are over, logged to MLflow together: one, and others beneath it as its children.

They take the way of all runs (`mlflow_uploader.py`): a spool each, delivered by one courier process. What can't be
delivered now waits in the directory, as a training's would.
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

from footplate.tracking import event_queue as spools
from footplate.tracking.base import Status
from footplate.tracking.event_queue import Progress, Record
from footplate.tracking.mlflow import CLOSE_TIMEOUT_S, MLFLOW_STATUS, destination, versions
from footplate.tracking.mlflow_uploader import Courier
from footplate.tracking.params import flatten, without_credentials

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """A run that is over.

    Attributes:
        name: what MLflow's pages call it.
        began_s: in seconds since 1970; likewise `ended_s`.
        params: flat or nested.
        metrics: rows of (step, values by name).
        artifacts: files.
        tags: of the run.
        status: how it ended.
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
    """Log a run with its children; the destination is found as by `MLflow`.

    Args:
        directory: the run's, which exists; what can't be delivered waits there for `deliver_pending`.
        experiment: the experiment's name.
        run: the parent.
        children: the runs beneath it.
        tracking_uri: a server or store.

    Returns:
        Whether all was delivered.
    """
    uri, artifacts = destination(tracking_uri, directory)
    home = {
        "uri": without_credentials(uri),
        "artifacts": artifacts and f"{artifacts}/{quote(experiment, safe='')}",
        "experiment": experiment,
    }
    parent = uuid.uuid4().hex
    for one, key, above in ((run, parent, None), *((child, uuid.uuid4().hex, parent) for child in children)):
        spools.append(spools.next_spool(directory), _records(one, {**home, "key": key, "parent": above}))
    Courier(directory, None, uri).close(CLOSE_TIMEOUT_S["success"])
    progress = Progress.load(directory)
    for note in progress.dropped:
        log.warning("MLflow refused %s", note)
    left = spools.pending(directory)
    if left:
        log.warning(
            "MLflow at %s did not get all of %s (%s). The rest is kept in %s and sent by "
            "footplate.tracking.mlflow.deliver_pending(%r).",
            home["uri"], run.name, progress.error or "it took too long", directory, str(directory),
        )  # fmt: skip
    return not left


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
