"""Delivery of records to MLflow, in the uploader process. Only this process imports MLflow.

Every request may be repeated, because a tracker may process a request and answer too late. A run is searched by its key
before it is created. A metric that is sent twice is one point, because MLflow keeps one of equal name, step, time and
value. A temporary failure is raised, and the uploader retries. If MLflow refuses a record permanently, it is listed in
`dropped`, and the delivery continues.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import mlflow
import psutil
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from footplate.tracking.batching import batched
from footplate.tracking.event_queue import Progress, Record, note_dropped
from footplate.tracking.mlflow_model import log_staged
from footplate.tracking.parameters import without_credentials

KEY_TAG = "footplate.run"
# MLflow's limits: entries in one call, and lengths of texts.
MOST_METRICS = 1000
MOST_PARAMS = 100
LONGEST_NAME = 250
LONGEST_PARAM = 6000
LONGEST_TAG = 8000

_REFUSED = {"INVALID_PARAMETER_VALUE", "INVALID_STATE", "BAD_REQUEST", "MALFORMED_REQUEST", "RESOURCE_DOES_NOT_EXIST"}


class MLflowDelivery:
    """A connection to one tracker. It delivers to one run at a time.

    Attributes:
        run_id: the MLflow run, after `start`.
        dropped: records that MLflow refused permanently.
    """

    confirms_each_batch = True

    def __init__(self, uri: str, progress: Progress, run_dir: Path) -> None:
        mlflow.set_tracking_uri(_without_login(uri))
        self._client = mlflow.MlflowClient()
        self._logged: set[tuple[str, int]] = set()
        self.run_id = ""
        self.dropped = list(progress.dropped)

    def start(self, record: Record) -> None:
        """Find or create the run of a "start" record, and deliver to it from now on."""
        run = self._find(record)
        if run is None:
            tags = {**record["tags"], KEY_TAG: record["key"], **self._parent(record)}
            run = self._client.create_run(
                self._experiment(record), record["time_ms"], _limited(tags, LONGEST_TAG), record["run_name"]
            )
        else:
            self._client.update_run(run.info.run_id, status="RUNNING")

        self.run_id = run.info.run_id
        self._log_params(_limited(record["params"], LONGEST_PARAM), run.data.params)
        resume_step = record["resume_step"]
        self._logged = set() if resume_step is None else self._points_from(resume_step, list(run.data.metrics))

    def batches(self, records: Iterable[tuple[Record, int]]) -> Iterator[tuple[list[Record], int]]:
        """Group records, with the position after each group: metrics in groups of about a thousand, others singly."""
        return batched(records, MOST_METRICS)

    def deliver(self, batch: list[Record]) -> None:
        """Deliver one batch of `batches`."""
        record = batch[0]
        match record["kind"]:
            case "metrics":
                self._log_metrics(batch)
            case "environment":
                self._log_environment(record["versions"])
            case "checkpoint":
                self._try(f"checkpoint {record['path']}", self._log_checkpoint, Path(record["path"]))
            case "artifact":
                arguments = (self.run_id, record["path"])
                self._try(f"artifact {record['path']}", self._client.log_artifact, *arguments)
            case "media":
                arguments = (self.run_id, record["path"], f"media/{record['media']}/{_valid_name(record['key'])}")
                self._try(f"{record['media']} {record['key']}", self._client.log_artifact, *arguments)
            case "model":
                arguments = (Path(record["path"]), self.run_id, record["step"], record["register_as"])
                self._try("the model", log_staged, *arguments)
            case "end":
                self._client.set_terminated(self.run_id, record["status"], record["time_ms"])

    def finish(self) -> None:
        """Set the run's status to "killed" if it is still running, because its training process ended without an "end"."""
        if self._client.get_run(self.run_id).info.status == "RUNNING":
            self._client.set_terminated(self.run_id, "KILLED")

    def abandon(self) -> None:
        """Do nothing: every batch is confirmed."""

    def state(self) -> dict[str, Any]:
        """Return nothing: MLflow itself has the state."""
        return {}

    def _find(self, record: Record) -> Run | None:
        if record["run_id"]:
            try:
                run = self._client.get_run(record["run_id"])
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            else:
                if run.info.lifecycle_stage == "active":
                    return run
        runs = self._with_key(record, record["key"])
        return runs[0] if runs else None

    def _parent(self, record: Record) -> dict[str, str]:
        """The tag that makes a run the child of the run whose key its record names."""
        key = record.get("parent")
        if not key:
            return {}
        runs = self._with_key(record, key)
        if not runs and record.get("parent_name"):
            runs = self._make_parent(record, key)
        return {"mlflow.parentRunId": runs[0].info.run_id} if runs else {}

    def _make_parent(self, record: Record, key: str) -> list[Run]:
        """Create the run of a tuning, whose first trial begins here. Returns it."""
        made = self._client.create_run(
            self._experiment(record), round(time.time() * 1000), {KEY_TAG: key}, record["parent_name"]
        )
        # No process delivers to it.
        self._client.set_terminated(made.info.run_id)
        runs = self._with_key(record, key)
        if runs[0].info.run_id != made.info.run_id:
            # The uploader of another trial was first.
            self._client.delete_run(made.info.run_id)
        return runs

    def _with_key(self, record: Record, key: str) -> list[Run]:
        """The runs of a key, the oldest first."""
        return self._client.search_runs(
            [self._experiment(record)], f"tags.`{KEY_TAG}` = '{key}'", order_by=["attributes.start_time ASC"]
        )

    def _experiment(self, record: Record) -> str:
        experiment = self._client.get_experiment_by_name(record["experiment"])
        if experiment is not None:
            return experiment.experiment_id
        return self._client.create_experiment(record["experiment"], artifact_location=record["artifacts"])

    def _log_params(self, params: dict[str, str], known: dict[str, str]) -> None:
        """Log parameters. MLflow keeps a parameter's first value, so a value that a resumed run changes becomes a tag."""
        new = [Param(name, value) for name, value in params.items() if name not in known]
        changed = {name: value for name, value in params.items() if known.get(name, value) != value}
        tags = [RunTag(f"resumed/{name}"[:LONGEST_NAME], value) for name, value in changed.items()]
        for start in range(0, len(new), MOST_PARAMS):
            self._client.log_batch(self.run_id, params=new[start : start + MOST_PARAMS])
        for start in range(0, len(tags), MOST_PARAMS):
            self._client.log_batch(self.run_id, tags=tags[start : start + MOST_PARAMS])

    def _points_from(self, step: int, names: list[str]) -> set[tuple[str, int]]:
        """The points that a killed attempt has logged of steps that are now repeated."""
        history = ((name, self._client.get_metric_history(self.run_id, name)) for name in names)
        return {(name, point.step) for name, points in history for point in points if point.step >= step}

    def _log_metrics(self, batch: list[Record]) -> None:
        points = [
            Metric(name, value, record["time_ms"], record["step"])
            for record in batch
            for name, value in ((_valid_name(name), value) for name, value in record["values"].items())
            if (name, record["step"]) not in self._logged
        ]
        for start in range(0, len(points), MOST_METRICS):
            self._send(points[start : start + MOST_METRICS])

    def _send(self, points: list[Metric]) -> None:
        """Send points in one call. If MLflow refuses one of them, send all others."""
        try:
            self._client.log_batch(self.run_id, metrics=points)
        except MlflowException as error:
            if error.error_code not in _REFUSED:
                raise
            if len(points) == 1:
                note_dropped(self.dropped, f"metric {points[0].key}", error)
                return
            middle = len(points) // 2
            self._send(points[:middle])
            self._send(points[middle:])

    def _log_environment(self, versions: dict[str, str]) -> None:
        for name, value in {**versions, **_source()}.items():
            self._client.set_tag(self.run_id, name, without_credentials(value)[:LONGEST_TAG])
        installed = {f"{package.name}=={package.version}" for package in importlib.metadata.distributions()}
        self._try("the environment", self._log_texts, "\n".join(sorted(installed, key=str.lower)) + "\n", _machine())

    def _log_texts(self, requirements: str, machine: dict[str, Any]) -> None:
        self._client.log_text(self.run_id, requirements, "environment/requirements.txt")
        self._client.log_dict(self.run_id, machine, "environment/machine.json")

    def _log_checkpoint(self, path: Path) -> None:
        if path.is_dir():
            self._client.log_artifacts(self.run_id, str(path), f"checkpoints/{path.name}")
        else:
            self._client.log_artifact(self.run_id, str(path), "checkpoints")

    def _try(self, what: str, action: Any, *args: Any) -> None:
        """Do something that may be impossible, such as logging a deleted checkpoint or writing without permission."""
        try:
            action(*args)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            note_dropped(self.dropped, what, error)
        except MlflowException as error:
            if error.error_code not in _REFUSED:
                raise
            note_dropped(self.dropped, what, error)


def _limited(values: dict[str, Any], longest: int) -> dict[str, str]:
    return {_valid_name(name): str(value)[:longest] for name, value in values.items()}


def _valid_name(name: str) -> str:
    """Replace characters that MLflow doesn't allow, and paths that lead outside."""
    name = re.sub(r"[^\w\-. :/]", "_", name)[:LONGEST_NAME]
    if any(part in ("", ".", "..") for part in name.split("/")):
        name = name.replace("/", "_")
    return name if name.strip(".") else name.replace(".", "_") or "_"


def _without_login(uri: str) -> str:
    """Move the user and password of a server's address to MLflow's variables, so that MLflow doesn't log them."""
    parts = urlsplit(uri)
    if not parts.scheme.startswith("http") or parts.username is None:
        return uri
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username)
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password or "")
    return without_credentials(uri)


def _source() -> dict[str, str]:
    """The tags with which MLflow shows the user and the commit of a run."""
    tags = {"mlflow.source.type": "LOCAL"}
    try:
        tags["mlflow.user"] = getpass.getuser()
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    except (OSError, KeyError, subprocess.TimeoutExpired):
        return tags
    if commit.returncode == 0:
        tags["mlflow.source.git.commit"] = commit.stdout.strip()
    return tags


def _machine() -> dict[str, Any]:
    return {
        "hostname": platform.node(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": sys.version,
    }
