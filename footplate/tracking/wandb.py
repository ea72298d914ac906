"""`WandB`: parameters, metrics, images and other values in Weights & Biases.

    trainer = fp.Trainer(logger=fp.WandB(project="flowers"), default_root_dir="runs/flowers")

The training process never imports W&B and never connects to its server. It queues records, a thread appends them to a
file in the run's directory, and the uploader process delivers this file (see `uploader.py` and `wandb_client.py`). A
server that is down, slow or hanging costs training nothing, and doesn't keep it from ending. Undelivered records wait
in the file until the next start.

With `mode="offline"`, the uploader writes W&B's own files to `wandb/` in the run's directory. `wandb sync` sends them.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from footplate.core.errors import ConfigError, MissingExtra
from footplate.tracking.attempt import Attempt, deliver
from footplate.tracking.base import Status
from footplate.tracking.event_queue import Progress
from footplate.tracking.parameters import plain, without_credentials
from footplate.tracking.trackers import WANDB
from footplate.tracking.uploaded_logger import UploadedLogger

DEFAULT_URL = "https://api.wandb.ai"
OFFLINE = "offline"
EXIT_CODES: dict[Status, int] = {"success": 0, "failed": 1, "interrupted": 255}


class WandB(UploadedLogger):
    """Log a run to Weights & Biases.

    Args:
        project: the project's name; it is created if it doesn't exist.
        entity: the user or team; your default entity by default.
        run_name: the run's name; the directory's name and the time by default.
        group: the name of a group of runs.
        tags: tags of the run.
        notes: a description.
        mode: "online", or "offline" to write files for `wandb sync`; the environment's `WANDB_MODE` by default, or else
            "online".

    Raises:
        MissingExtra: W&B is not installed.
        ConfigError: an argument has an invalid value.

    Examples:
        >>> trainer = fp.Trainer(logger=fp.WandB("flowers", tags=["baseline"], mode="offline"))
    """

    name = "wandb"

    def __init__(
        self,
        project: str = "default",
        entity: str | None = None,
        run_name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        if not _is_installed():
            raise MissingExtra('Logging to W&B needs wandb. Install it with: pip install "footplate[wandb]"')
        if not project.strip():
            raise ConfigError(f"project={project!r}: expected a name.")
        if isinstance(tags, str):
            raise ConfigError(f"tags={tags!r}: expected a list of texts, such as [{tags!r}].")
        mode = mode or os.environ.get("WANDB_MODE") or "online"  # type: ignore[assignment]
        if mode not in ("online", "offline"):
            raise ConfigError(f'mode={mode!r}: expected "online" or "offline".')
        super().__init__()
        self._project = project
        self._entity = entity or os.environ.get("WANDB_ENTITY")
        self._run_name = run_name
        self._group = group
        self._tags = list(tags)
        self._notes = notes
        self._mode = mode

        self._key = ""

    def setup(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Start or continue the run. Returns at once; the uploader process contacts W&B.

        Raises:
            ConfigError: there is no API key for the server.
        """
        resumed, self._resumed = self._resumed, None
        self._step = resumed["step"] if resumed else 0
        if resumed is not None:
            self._begin(run_dir, hparams, resumed["key"], self._step)
        else:
            # The same logger continues the run that it has finalized.
            key = self._key if self._run_dir == run_dir else _new_key()
            self._begin(run_dir, hparams, key, None)

    def append(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Continue the run that was last logged in this directory; start one if there is none."""
        key = self._key if self._run_dir == run_dir else Progress.load(run_dir, WANDB.name).key
        self._begin(run_dir, hparams if key is None else None, key or _new_key(), None)

    def _begin(self, run_dir: Path, hparams: dict[str, Any] | None, key: str, resume_step: int | None) -> None:
        uri = destination(self._mode)
        self._run_dir = run_dir
        self._key = key
        self._attempt = Attempt(WANDB, run_dir, uri)
        self._attempt.put(
            "start",
            key=key,
            uri=without_credentials(uri),
            resume_step=resume_step,
            project=self._project,
            entity=self._entity,
            run_name=self._run_name or f"{run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}",
            group=self._group,
            tags=self._tags,
            notes=self._notes,
            params=plain(hparams or {}),
        )
        self._attempt.flush(0)

    def _put_last(self, attempt: Attempt, status: Status) -> None:
        attempt.put("end", exit_code=EXIT_CODES[status])

    @property
    def run_id(self) -> str | None:
        """The id of the W&B run; None before `setup`."""
        return self._key or None

    def state_dict(self) -> dict[str, Any]:
        """The run and its last step."""
        return {"key": self._key, "step": self._step}


def deliver_pending(
    run_dir: str | Path, mode: Literal["online", "offline"] = "online", timeout_s: float = 300.0
) -> bool:
    """Send undelivered records of a directory's runs to W&B, after their training has ended.

    Args:
        run_dir: the run's directory, with the `wandb-pending-*.jsonl` files.
        mode: the mode of these runs.
        timeout_s: how long to try.

    Returns:
        True if everything is delivered.

    Raises:
        ConfigError: there is no API key for the server.
    """
    return deliver(WANDB, Path(run_dir), destination(mode), timeout_s)


def destination(mode: str) -> str:
    """Return the address of the server, or "offline".

    Raises:
        ConfigError: there is no API key for the server.
    """
    if mode == OFFLINE:
        return OFFLINE
    url = os.environ.get("WANDB_BASE_URL") or DEFAULT_URL
    if not _has_credentials(url):
        raise ConfigError(
            f"W&B at {without_credentials(url)}: there is no API key for this server. Run `wandb login`, set "
            'WANDB_API_KEY, or use WandB(mode="offline").'
        )
    return url


def _is_installed() -> bool:
    """Return True if the package can be imported. W&B leaves folders of its own name, which Python takes for a package."""
    spec = importlib.util.find_spec("wandb")
    return spec is not None and spec.origin is not None


def _has_credentials(url: str) -> bool:
    """Return True where W&B finds credentials: in its variables or in the .netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    given = os.environ.get("NETRC")
    candidates = [Path(given)] if given else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for path in candidates:
        try:
            if netrc.netrc(path).authenticators(urlsplit(url).netloc):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _new_key() -> str:
    """Return a random run id. W&B allows no more than 64 characters."""
    return uuid.uuid4().hex[:16]
