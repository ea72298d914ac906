"""`MLflow`: parameters, metrics, the environment, checkpoints and the model itself, in MLflow.

    trainer = fp.Trainer(logger=fp.MLflow(experiment="flowers"), default_root_dir="runs/flowers")
    mlflow ui --backend-store-uri sqlite:///runs/mlflow.db          # view it

Without a tracking URI (argument or `MLFLOW_TRACKING_URI`), the runs of a project share an embedded SQLite store beside
their directories: `runs/mlflow.db`, with artifacts in `runs/mlartifacts`.

In a trial of a tuning, the run is a child of the tuning's run, and has the trial's number as a tag.

The training process never imports MLflow and never connects to a tracker. It queues records, a thread appends them to a
file in the run's directory, and the uploader process delivers this file (see `uploader.py`). A tracker that is down
or slow costs training nothing. Undelivered records wait in the file until the tracker is back, or until the next start.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from footplate.core.errors import ConfigError, FootplateError
from footplate.core.optional import require
from footplate.tracking.attempt import Attempt, deliver
from footplate.tracking.base import Status
from footplate.tracking.event_queue import Progress
from footplate.tracking.mlflow_model import stage
from footplate.tracking.parameters import flatten, without_credentials
from footplate.tracking.trackers import MLFLOW
from footplate.tracking.uploaded_logger import UploadedLogger

log = logging.getLogger(__name__)

RUN_ID_TIMEOUT_S = 20.0
MLFLOW_STATUS: dict[Status, str] = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MLflow(UploadedLogger):
    """Log a run to MLflow.

    Args:
        experiment: the experiment's name; it is created if it doesn't exist.
        run_name: the run's name in MLflow; the directory's name and the time by default.
        tracking_uri: a server or store; the environment's `MLFLOW_TRACKING_URI` by default, or else an SQLite file
            beside the run's directory.
        tags: tags of the run.
        register_as: register the final model under this name, as a new version.
        log_checkpoints: "best": log the best checkpoint (the last, without a monitor) when training ends; "all": log each
            when it is written; "none": log no checkpoint.
        log_model: log the final model, so that `mlflow.pyfunc` and `mlflow.pytorch` load it.

    Raises:
        MissingExtra: MLflow is not installed.
        ConfigError: an argument has an invalid value.

    Examples:
        >>> logger = fp.MLflow("flowers", tags={"team": "vision"}, log_checkpoints="best", register_as="flowers")
        >>> trainer = fp.Trainer(logger=logger)
    """

    name = "mlflow"

    def __init__(
        self,
        experiment: str = "default",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, str] | None = None,
        register_as: str | None = None,
        log_checkpoints: Literal["none", "best", "all"] = "best",
        log_model: bool = True,
    ) -> None:
        if importlib.util.find_spec("mlflow") is None:
            require("mlflow", "mlflow", "Logging to MLflow")
        if log_checkpoints not in ("none", "best", "all"):
            raise ConfigError(f'log_checkpoints={log_checkpoints!r}: expected "none", "best" or "all".')
        if not experiment.strip():
            raise ConfigError(f"experiment={experiment!r}: expected a name.")
        if register_as and not log_model:
            raise ConfigError(f'register_as="{register_as}" needs the model: leave log_model=True.')
        super().__init__()
        self._experiment = experiment
        self._run_name = run_name
        self._tracking_uri = tracking_uri
        self._tags = dict(tags or {})
        self._register_as = register_as
        self._checkpoints = log_checkpoints
        self._with_model = log_model

        self._key = ""
        self._final_checkpoint: tuple[str, Path] | None = None

    def setup(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Start or continue the run. Returns at once; the uploader process contacts MLflow.

        Raises:
            ConfigError: the event queue can't be written into the run's directory.
        """
        resumed, self._resumed = self._resumed, None
        self._step = resumed["step"] if resumed else 0
        if resumed is None and self._run_dir == run_dir:
            # Continue the run that this logger has finalized.
            resumed = self.state_dict()
            self._begin(run_dir, hparams, resumed["key"], resumed["run_id"], None)
        elif resumed is None:
            self._begin(run_dir, hparams, uuid.uuid4().hex, None, None)
        else:
            self._begin(run_dir, hparams, resumed["key"], resumed["run_id"], self._step)

    def append(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Continue the run that was last logged in this directory; start one if there is none."""
        progress = Progress.load(run_dir)
        key = self._key if self._run_dir == run_dir else progress.key
        if key is None:
            self._begin(run_dir, hparams, uuid.uuid4().hex, None, None)
        else:
            self._begin(run_dir, None, key, progress.run_id if progress.key == key else None, None)

    def _begin(
        self, run_dir: Path, hparams: dict[str, Any] | None, key: str, run_id: str | None, resume_step: int | None
    ) -> None:
        """Start an attempt. Without `hparams`, the run keeps its parameters and environment."""
        uri, artifacts = destination(self._tracking_uri, run_dir)
        self._run_dir = run_dir
        self._key = key
        self._final_checkpoint = None
        self._attempt = Attempt(MLFLOW, run_dir, uri)
        self._attempt.put(
            "start",
            key=self._key,
            run_id=run_id,
            resume_step=resume_step,
            uri=without_credentials(uri),
            artifacts=artifacts and f"{artifacts}/{quote(self._experiment, safe='')}",
            experiment=self._experiment,
            run_name=self._run_name or f"{run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}",
            tags={"mlflow.source.name": sys.argv[0], **_trial_tags(), **self._tags},
            params=flatten(hparams or {}),
            **_tuning(),
        )
        if hparams is not None:
            self._attempt.put("environment", versions=versions())
        self._attempt.flush(0)

    def log_checkpoint(self, path: Path, aliases: tuple[str, ...]) -> None:
        """Queue a checkpoint, or keep its path to log it when training ends."""
        if self._attempt is None or self._checkpoints == "none":
            return
        if self._checkpoints == "all":
            self._attempt.put("checkpoint", path=str(path.resolve()))
        elif "best" in aliases or self._final_checkpoint is None or self._final_checkpoint[0] != "best":
            self._final_checkpoint = ("best" if "best" in aliases else "last", path)

    def log_model(self, trainer: Any) -> None:
        """Export a copy of the model on the CPU. The uploader logs it."""
        if self._attempt is None or not self._with_model:
            return
        directory = self._attempt.model_dir
        try:
            stage(trainer.module, directory)
        except (FootplateError, OSError) as error:
            log.warning("The model is not logged to MLflow: %s", error)
        else:
            path = str(directory.resolve())
            self._attempt.put("model", path=path, step=trainer.global_step, register_as=self._register_as)

    def _put_last(self, attempt: Attempt, status: Status) -> None:
        if self._final_checkpoint:
            attempt.put("checkpoint", path=str(self._final_checkpoint[1].resolve()))
        attempt.put("end", status=MLFLOW_STATUS[status])

    @property
    def run_id(self) -> str | None:
        """The id of the MLflow run. Waits for it up to 20 seconds; None if MLflow can't be reached."""
        if self._run_dir is None:
            return None
        deadline = time.monotonic() + RUN_ID_TIMEOUT_S
        while True:
            progress = Progress.load(self._run_dir)
            if progress.key == self._key:
                return progress.run_id
            if progress.error or self._attempt is None or time.monotonic() > deadline:
                return None
            time.sleep(0.05)

    def state_dict(self) -> dict[str, Any]:
        """The run and its last step."""
        progress = Progress.load(self._run_dir) if self._run_dir else Progress()
        return {"key": self._key, "run_id": progress.run_id if progress.key == self._key else None, "step": self._step}


def deliver_pending(run_dir: str | Path, tracking_uri: str | None = None, timeout_s: float = 300.0) -> bool:
    """Send undelivered records of a directory's runs to MLflow, after their training has ended.

    Args:
        run_dir: the run's directory, with the `mlflow-pending-*.jsonl` files.
        tracking_uri: the tracking URI of these runs; by default, it is found in the same way as by `MLflow`.
        timeout_s: how long to try.

    Returns:
        True if everything is delivered.
    """
    uri, _ = destination(tracking_uri, Path(run_dir))
    return deliver(MLFLOW, Path(run_dir), uri, timeout_s)


def destination(tracking_uri: str | None, run_dir: Path) -> tuple[str, str | None]:
    """Return the tracking URI, and the location of artifacts; None if the server chooses it."""
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri:
        return uri, None
    project = run_dir.resolve().parent
    return f"sqlite:///{project / 'mlflow.db'}", (project / "mlartifacts").as_uri()


def versions() -> dict[str, str]:
    """Return the versions for a run's tags."""
    import torch

    from footplate.core.version import __version__

    return {"python": platform.python_version(), "torch": str(torch.__version__), "footplate": __version__}


def _tuning() -> dict[str, str]:
    """The key and the name of the run to which a trial of a tuning belongs. Empty outside of a trial."""
    key = os.environ.get("FOOTPLATE_TRIAL_TUNING")
    return {"parent": key, "parent_name": os.environ["CLOUD_ML_JOB_ID"]} if key else {}


def _trial_tags() -> dict[str, str]:
    return {"footplate.trial": os.environ["CLOUD_ML_TRIAL_ID"]} if "FOOTPLATE_TRIAL_TUNING" in os.environ else {}
