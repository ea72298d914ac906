"""The courier: a small process beside training that delivers its records to MLflow.

Why a process and not a thread: MLflow takes seconds to import and to create its database, and Python runs one thread
at a time, so in a thread it made short training steps eight times slower for those seconds. It also draws from the
`random` module, which would change a resumed run.

    training process                                       courier process
    appends records to the spool  ──────── spool ────────► reads on, delivers in order, notes its progress
    says "end" at last, or dies   ──────── stdin ────────► tries all once more, ends

There is one courier at a time in a run's directory: a lock makes the one of a restarted attempt wait until its
predecessor has ended. It begins with what older attempts left over. While the tracker can't be reached, the spool
grows and the courier tries again at growing intervals; when training ends meanwhile, the spool stays for the next
start, or for `footplate.tracking.mlflow.deliver_pending`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from footplate.tracking import event_queue as spools
from footplate.tracking.event_queue import Progress
from footplate.tracking.params import without_credentials

POLL_S = 0.5
LONGEST_PAUSE_S = 30.0
RESTART_AFTER_S = 60.0
REQUEST_TIMEOUT_S = 20

ENVIRONMENT = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
# The courier tries again by itself; it must notice soon that a tracker hangs.
ENVIRONMENT_DEFAULTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": str(REQUEST_TIMEOUT_S)}

# The configuration comes through the pipe: a command line, which may show a password, is visible to everyone.
# It is read without a buffer, so that what follows it stays visible to `select`.
_BOOTSTRAP = (
    "import json, sys; config = json.loads(open(0, 'rb', buffering=0, closefd=False).readline()); "
    "sys.path[:] = config.pop('sys_path'); "
    "from footplate.tracking.mlflow_uploader import main; sys.exit(main(**config))"
)


class Courier:
    """The training process's handle on its courier: `start` whenever there is something to deliver, `close` at the end.

    Args:
        run_dir: the run's directory.
        spool: the spool of this attempt; None to deliver only what older attempts left over.
        uri: MLflow's tracking URI, credentials included.
    """

    def __init__(self, run_dir: Path, spool: Path | None, uri: str) -> None:
        self._run_dir = run_dir
        self._config = {
            "run_dir": str(run_dir.resolve()),
            "live": spool.name if spool else None,
            "uri": uri,
            "parent": os.getpid(),
            "sys_path": [str(Path(entry or ".").resolve()) for entry in sys.path],
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process unless it runs; one that died is started again, at most once a minute."""
        waits = self._started and time.monotonic() - self._started < RESTART_AFTER_S
        if not self.running and not waits:
            self._spawn()

    def close(self, timeout_s: float) -> None:
        """Let it try to deliver all, for at most `timeout_s`, and see that it has ended."""
        if not self.running:
            self._spawn()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(b"end\n")  # closing it is not enough: data-loading workers may have inherited it
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        log = self._run_dir / "mlflow.log"
        if log.exists() and log.stat().st_size == 0:
            log.unlink()

    def _spawn(self) -> None:
        self._started = time.monotonic()
        with (self._run_dir / "mlflow.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=ENVIRONMENT_DEFAULTS | dict(os.environ) | ENVIRONMENT,
                start_new_session=True,  # Ctrl-C is for the training process, which then tells the courier
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(self._config).encode() + b"\n")
            self._process.stdin.flush()


def main(run_dir: str, live: str | None, uri: str, parent: int) -> int:
    """What the courier process runs; returns its exit status: 0 when all is delivered."""
    with contextlib.suppress(OSError):
        os.nice(10)  # training comes first
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ended, parent), daemon=True).start()
    with _only_one_in(Path(run_dir)):
        return Round(Path(run_dir), live, uri).repeat_until(ended)


class Round:
    """One courier's rounds through the spools of a run's directory."""

    def __init__(self, run_dir: Path, live: str | None, uri: str) -> None:
        self._run_dir = run_dir
        self._live = live
        self._uri = _without_login(uri)
        self._destination = without_credentials(uri)
        self._delivery: Any = None
        self._opened: Path | None = None
        self._progress = Progress.load(run_dir)

    def repeat_until(self, ended: threading.Event) -> int:
        """Deliver, again and again, until training has ended; then once more."""
        pause_s = POLL_S
        while True:
            last = ended.is_set()
            try:
                self._deliver_all(last)
                pause_s = POLL_S
            except Exception as error:
                self._save(replace(self._progress, error=_describe(error)))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if last:
                return 0 if self._progress.error is None else 1
            ended.wait(pause_s)

    def _deliver_all(self, last: bool) -> None:
        for spool in spools.pending(self._run_dir):
            if self._live and spool.name > self._live:
                return  # of a later attempt, which has a courier of its own
            start = spools.first_record(spool)
            is_live = spool.name == self._live and not last
            if start is None and is_live:
                return
            if start is not None and start["uri"] != self._destination:
                continue
            if start is not None:
                self._deliver_spool(spool, start)
            if not is_live:
                self._finish(spool)

    def _deliver_spool(self, spool: Path, start: spools.Record) -> None:
        delivery = self._connect()
        if self._opened != spool:
            delivery.start(start)
            self._opened = spool
            self._save(replace(self._progress, key=start["key"], run_id=delivery.run_id, error=None))
        records = spools.read(spool, self._progress.delivered.get(spool.name, 0))
        for batch, position in delivery.batches(records):
            delivery.deliver(batch)
            self._save(replace(self._progress.at(spool, position), dropped=tuple(delivery.dropped)))
        if self._progress.error is not None:
            self._save(replace(self._progress, error=None))

    def _finish(self, spool: Path) -> None:
        """A spool whose writer is gone and whose records are delivered."""
        if self._opened == spool:
            self._connect().close_run_if_open()
        self._save(self._progress.without(spool))
        spool.unlink()

    def _connect(self) -> Any:
        if self._delivery is None:
            from footplate.tracking.mlflow_client import Delivery

            self._delivery = Delivery(self._uri, list(self._progress.dropped))
        return self._delivery

    def _save(self, progress: Progress) -> None:
        self._progress = progress
        progress.save(self._run_dir)


def _without_login(uri: str) -> str:
    """A server's address; its user and password move to the variables in which MLflow looks for them, out of its log."""
    parts = urlsplit(uri)
    if not parts.scheme.startswith("http") or parts.username is None:
        return uri
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username)
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password or "")
    return without_credentials(uri)


def _describe(error: Exception) -> str:
    return without_credentials(f"{type(error).__name__}: {error}")[:500]


def _wait_for_end(ended: threading.Event, parent: int) -> None:
    """Set `ended` at a word from the training process, at the end of input, or when another process is the parent."""
    while os.getppid() == parent:
        ready, _, _ = select.select([0], [], [], POLL_S)
        if ready:
            break
    ended.set()


@contextlib.contextmanager
def _only_one_in(run_dir: Path) -> Iterator[None]:
    import fcntl  # not on Windows, where only importing this module must work

    with (run_dir / ".mlflow.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
