"""A run, as its directory shows it: read once, tolerantly, into plain values for the sections of a report.

A run that still trains, was killed or failed has a report too. Only an empty directory, or one of something else, has none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from footplate.callbacks.alert import RECORD as ALERTS
from footplate.checkpoint.storage import is_remote
from footplate.core.errors import CheckpointError, ConfigError, FootplateError
from footplate.jobs.hangs import hangs_of_run
from footplate.launch.hang_files import hang_files
from footplate.replaying.recorded_run import Saved, saved_in
from footplate.reporting.environment import read_environment
from footplate.reporting.metrics_file import NAMES, Metrics, read_metrics
from footplate.reporting.monitor_log import MonitorLog, read_monitor
from footplate.tracking.parameters import flatten
from footplate.training.lock import is_held

log = logging.getLogger(__name__)

PLAN = "plan.json"
CONFIG = "config.yaml"
_LONGEST_TEXT = 200_000

STATUSES = {
    "finished": "The run has finished.",
    "interrupted": "The run was interrupted. It can continue from its last checkpoint.",
    "failed": "The run has failed. It can continue from its last checkpoint.",
    "running": "The run goes on. This report shows what is known so far.",
    "killed": "The process of the run recorded no end: it was killed, or its machine was lost. "
    "The run can continue from its last checkpoint.",
    "ended": "No process trains in this directory. The run has no record of how it ended.",
}


@dataclass(frozen=True)
class Hang:
    """Stacks of ranks that hung. The first line of the text explains them."""

    name: str
    text: str


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's directory.

    Attributes:
        directory: the directory.
        name: the name of the run in the report.
        status: one of `STATUSES`.
        metrics: what was logged.
        monitor: where the time went.
        hparams: the hyper-parameters, in one level.
        checkpoint: the newest complete checkpoint, in the directory or elsewhere; None if there is none.
        state: the state in that checkpoint, without its tensors; empty without a checkpoint.
        environment: what `fp.Report()` recorded when the run started.
        plan: the plan that was saved beside the run; None without one.
        config: the configuration of `footplate fit`; None for a script.
        hangs: the hangs that a launch explained, in the directory and in the folders of its job's attempts.
        alerts: the messages of alerts.
    """

    directory: Path
    name: str
    status: str
    metrics: Metrics = field(default_factory=Metrics)
    monitor: MonitorLog = field(default_factory=MonitorLog)
    hparams: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Saved | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None
    config: Path | None = None
    hangs: Sequence[Hang] = ()
    alerts: Sequence[Mapping[str, Any]] = ()


def read_run(directory: str | Path, status: str | None = None, data: bool = True) -> RunRecord:
    """Read a run.

    Args:
        directory: the run's directory.
        status: how the run has ended, if the caller knows.
        data: read checkpoints in buckets, too.

    Raises:
        ConfigError: the directory doesn't exist, or holds no run.
    """
    if is_remote(directory):
        raise ConfigError(
            f"{directory}: the directory of a run is on a disk. Give that directory; its record names the bucket with its "
            "checkpoints."
        )
    directory = Path(directory)
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: there is no such directory. Give the directory of a run, such as runs/flowers."
        )
    metrics, monitor = read_metrics(directory), read_monitor(directory)
    hparams, (checkpoint, state) = _json(directory / "hparams.json"), _checkpoint(directory, monitor, data)
    if metrics.file is None and not monitor.attempts and not hparams and checkpoint is None:
        raise ConfigError(
            f"{directory}: this directory holds no run. Expected one of {', '.join(NAMES)}, hparams.json, monitor.jsonl or "
            "a checkpoint. A Trainer writes them into its default_root_dir."
        )

    config = directory / CONFIG
    return RunRecord(
        directory=directory,
        name=directory.name or directory.resolve().name,
        status=status or find_status(monitor, is_held(directory)),
        metrics=metrics,
        monitor=monitor,
        hparams=flatten(hparams),
        checkpoint=checkpoint,
        state=state,
        environment=read_environment(directory),
        plan=_json(directory / PLAN) or None,
        config=config if config.is_file() else None,
        hangs=list(_hangs(directory, monitor)),
        alerts=list(_alerts(directory / ALERTS)),
    )


def find_status(monitor: MonitorLog, held: bool | None) -> str:
    """Find out how a run is.

    Args:
        monitor: its record.
        held: a process holds the directory's lock (True), or left it behind (False); None without a lock.
    """
    if held:
        return "running"
    last = monitor.last
    if last is not None:
        return last.status if last.status in STATUSES else "killed"
    # A job's attempt leaves its lock behind when it ends well, too.
    return "ended"


def _checkpoint(directory: Path, monitor: MonitorLog, data: bool) -> tuple[Saved | None, Mapping[str, Any]]:
    """Find the newest checkpoint in the directory and in the places that the run's record names, and read its state."""
    elsewhere = {place for attempt in monitor.attempts for place in attempt.start.checkpoints}
    saved = list(_saved_in(str(directory)))
    for place in sorted(elsewhere):
        if data or not is_remote(place):
            saved += _saved_in(place)
    newest = max(saved, key=lambda checkpoint: checkpoint.meta["created"], default=None)
    if newest is None:
        return None, {}
    try:
        return newest, newest.outline()
    except (FootplateError, OSError, ValueError) as error:
        log.warning("The state in %s can't be read: %s The report leaves it out.", newest.path, error)
        return newest, {}


def _saved_in(place: str) -> list[Saved]:
    """Return the complete checkpoints in a place; none if it can't be reached, with a warning."""
    try:
        return saved_in(place)
    except CheckpointError as error:
        if is_remote(place):
            log.warning("%s The report leaves these checkpoints out.", error)
        return []


def _hangs(directory: Path, monitor: MonitorLog) -> Iterator[Hang]:
    """Read the hangs of a run. A launch in a job writes them into the folder of the job's attempt."""
    for file in hang_files(directory):
        yield Hang(file.name, file.read_text(errors="replace")[:_LONGEST_TEXT])
    for job in dict.fromkeys(attempt.start.job for attempt in monitor.attempts if attempt.start.job):
        for hang in hangs_of_run(job):
            yield Hang(f"{hang.file.parent.name}/{hang.file.name}", hang.text)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _alerts(path: Path) -> Sequence[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    messages = []
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict):
            messages.append(message)
    return messages
