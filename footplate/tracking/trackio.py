"""`Trackio`: parameters, metrics, images and other values in Trackio, on this machine or on a server of your own.

    trainer = fp.Trainer(logger=fp.Trackio(project="flowers"), default_root_dir="runs/flowers")
    trackio show --project flowers                                   # view it

The training process never imports Trackio. It queues records, a thread appends them to a file in the run's directory, and
the uploader process delivers this file (see `uploader.py` and `trackio_client.py`). A database that is locked or a server
that is down costs training nothing. Undelivered records wait in the file until the next start.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

from footplate.core.errors import ConfigError
from footplate.core.optional import require
from footplate.tracking.attempt import Attempt, deliver
from footplate.tracking.event_queue import Progress
from footplate.tracking.parameters import flatten, without_credentials
from footplate.tracking.trackers import TRACKIO
from footplate.tracking.uploaded_logger import UploadedLogger

# Trackio ignores other characters, so two projects could share a database.
_PROJECT = re.compile(r"[A-Za-z0-9_-]+")


class Trackio(UploadedLogger):
    """Log a run to Trackio.

    Args:
        project: the project's name: letters, digits, `_` and `-`.
        run_name: the run's name; the directory's name and the time by default.
        group: the name of a group of runs.
        server_url: the address of a server that `trackio show` has started, with or without its `write_token`; the
            environment's `TRACKIO_SERVER_URL` by default, or else Trackio's directory on this machine.

    Raises:
        MissingExtra: Trackio is not installed.
        ConfigError: an argument has an invalid value.

    Examples:
        >>> trainer = fp.Trainer(logger=fp.Trackio("flowers", group="baselines"))
    """

    name = "trackio"

    def __init__(
        self,
        project: str = "default",
        run_name: str | None = None,
        group: str | None = None,
        server_url: str | None = None,
    ) -> None:
        if importlib.util.find_spec("trackio") is None:
            require("trackio", "trackio", "Logging to Trackio")
        if not _PROJECT.fullmatch(project):
            raise ConfigError(f"project={project!r}: expected a name of letters, digits, `_` and `-`.")
        if run_name is not None and (not run_name.strip(".") or "/" in run_name):
            raise ConfigError(f"run_name={run_name!r}: expected a name without `/`. Trackio has a folder of this name.")
        super().__init__()
        self._project = project
        self._run_name = run_name
        self._group = group
        self._server_url = server_url

        self._run: dict[str, Any] = {}

    def setup(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Start or continue the run. Returns at once; the uploader process writes to Trackio.

        Raises:
            ConfigError: a server without its write token; a Space, which can't be logged to.
        """
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._step = resumed["step"]
            self._begin(run_dir, hparams, resumed["run"], self._step)
        else:
            self._step = 0
            # The same logger continues the run that it has finalized.
            self._begin(run_dir, hparams, self._run if self._run_dir == run_dir else self._new_run(run_dir), None)

    def append(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Continue the run that was last logged in this directory; start one if there is none."""
        state = Progress.load(run_dir, TRACKIO.name).state
        if self._run_dir == run_dir:
            self._begin(run_dir, None, self._run, None)
        elif state:
            self._begin(run_dir, None, state["run"], None)
        else:
            self._begin(run_dir, hparams, self._new_run(run_dir), None)

    def _new_run(self, run_dir: Path) -> dict[str, Any]:
        """Return the id, the name and the time of a new run."""
        name = self._run_name or f"{run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        return {"key": uuid.uuid4().hex, "name": name, "created": datetime.now(UTC).isoformat()}

    def _begin(
        self, run_dir: Path, hparams: dict[str, Any] | None, run: dict[str, Any], resume_step: int | None
    ) -> None:
        """Start an attempt. Without `hparams`, the run keeps its parameters."""
        uri = destination(self._server_url)
        self._run_dir = run_dir
        self._run = run
        self._attempt = Attempt(TRACKIO, run_dir, uri)
        self._attempt.put(
            "start",
            key=run["key"],
            run=run,
            uri=without_credentials(uri),
            attempt=uuid.uuid4().hex,
            resume_step=resume_step,
            project=self._project,
            group=self._group,
            params=None if hparams is None else flatten(hparams),
        )
        self._attempt.flush(0)

    @property
    def run_id(self) -> str | None:
        """The id of the Trackio run; None before `setup`."""
        return self._run.get("key")

    def state_dict(self) -> dict[str, Any]:
        """The run and its last step."""
        return {"run": self._run, "step": self._step}


def deliver_pending(run_dir: str | Path, server_url: str | None = None, timeout_s: float = 300.0) -> bool:
    """Send undelivered records of a directory's runs to Trackio, after their training has ended.

    Args:
        run_dir: the run's directory, with the `trackio-pending-*.jsonl` files.
        server_url: the server of these runs, as for `Trackio`.
        timeout_s: how long to try.

    Returns:
        True if everything is delivered.

    Raises:
        ConfigError: a server without its write token.
    """
    return deliver(TRACKIO, Path(run_dir), destination(server_url), timeout_s)


def destination(server_url: str | None) -> str:
    """Return the address of the server with the write token in place of a user, or the path of Trackio's directory.

    Raises:
        ConfigError: no address; a server without its write token; a Space in the environment.
    """
    server_url = server_url or os.environ.get("TRACKIO_SERVER_URL")
    if not server_url:
        space = os.environ.get("TRACKIO_SPACE_ID")
        if space:
            raise ConfigError(
                f"TRACKIO_SPACE_ID={space!r}: Trackio logs to a directory or to a server here, not to a Space. Unset it, "
                "and send the project afterwards: trackio sync --project NAME --space-id SPACE."
            )
        return str(_directory().absolute())
    parts = urlsplit(server_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"server_url={without_credentials(server_url)!r}: expected http://… or https://….")
    tokens = parse_qs(parts.query).get("write_token") or [os.environ.get("TRACKIO_WRITE_TOKEN", "")]
    address = parts.netloc.rpartition("@")[2]
    if not tokens[0]:
        raise ConfigError(
            f"Trackio at {parts.scheme}://{address}: there is no write token for this server. Set TRACKIO_WRITE_TOKEN, or "
            "take the address with ?write_token=… that `trackio show` prints."
        )
    return urlunsplit((parts.scheme, f"{quote(tokens[0], safe='')}@{address}", parts.path, "", ""))


def _directory() -> Path:
    """Return the directory in which Trackio looks for its projects."""
    own = os.environ.get("TRACKIO_DIR")
    if own:
        return Path(own)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.path.expandvars(home)).expanduser() / "trackio"
