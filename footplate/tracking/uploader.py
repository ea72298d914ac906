"""The uploader: a process that delivers the records of a training process to one tracker.

Each tracker of a run has its own uploader. `trackers.py` has the contract of the tracker's client.

Why a process and not a thread: MLflow takes seconds to import and to create its database. Python runs one thread at a
time, so in a thread this made short training steps eight times slower for these seconds. MLflow also draws from the
`random` module, which would change a resumed run. A W&B server that doesn't answer blocks W&B's own code for hours.

    training process                                       uploader process
    appends records to its queue  ──────── queue ────────► reads, delivers in order, saves its progress
    sends "end", or dies          ──────── stdin ────────► tries to deliver everything once more, exits

A run's directory has one uploader of a tracker at a time: with a lock, the uploader of a restarted attempt waits until
the previous one has ended. It starts with the queues of older attempts. While the tracker can't be reached, the queue
grows, and the uploader retries with increasing delays. If training ends in the meantime, the queue stays for the next
start, or for `deliver_pending` of the tracker's module, such as `footplate.tracking.mlflow`.
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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

from footplate.tracking import event_queue
from footplate.tracking.event_queue import Progress
from footplate.tracking.parameters import without_credentials
from footplate.tracking.trackers import MLFLOW, TRACKERS, Delivery, Tracker

POLL_S = 0.5
LONGEST_PAUSE_S = 30.0
RESTART_AFTER_S = 60.0

# The configuration may hold a password, and every user can read a command line, so it is sent through the pipe.
# It is read without a buffer, so that `select` sees the data after it.
BOOTSTRAP = (
    "import json, sys; config = json.loads(open(0, 'rb', buffering=0, closefd=False).readline()); "
    "sys.path[:] = config.pop('sys_path'); "
    "from footplate.tracking.uploader import main; sys.exit(main(**config))"
)


def start(environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the process of an uploader. It reads its configuration from the first line of its input."""
    return subprocess.Popen(
        [sys.executable, "-c", BOOTSTRAP],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=environment,
        # Ctrl-C goes to the training process only, which then ends the uploader.
        start_new_session=True,
    )


class Uploader:
    """The training process's handle on its uploader. Call `start` when there are records, and `close` at the end.

    Args:
        run_dir: the run's directory.
        queue: the event queue of this attempt; None to deliver only the queues of older attempts.
        uri: the tracker's address, with credentials.
        tracker: the tracker.
    """

    def __init__(self, run_dir: Path, queue: Path | None, uri: str, tracker: Tracker = MLFLOW) -> None:
        self._run_dir = run_dir
        self._tracker = tracker
        self._config = {
            "tracker": tracker.name,
            "run_dir": str(run_dir.resolve()),
            "live": queue.name if queue else None,
            "uri": uri,
            "parent": os.getpid(),
            "sys_path": [str(Path(entry or ".").resolve()) for entry in sys.path],
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0

    @property
    def running(self) -> bool:
        """True if the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process if it doesn't run. If it died, it is restarted at most once a minute."""
        waits = self._started and time.monotonic() - self._started < RESTART_AFTER_S
        if not self.running and not waits:
            self._spawn()

    def close(self, timeout_s: float) -> None:
        """Let the process deliver everything within `timeout_s`, then make sure that it has ended."""
        if not self.running:
            self._spawn()
        assert self._process is not None
        assert self._process.stdin is not None

        # Closing the pipe is not enough: data-loading workers may have inherited it.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(b"end\n")
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._kill(self._process)
        self._process = None
        log = self._run_dir / f"{self._tracker.name}.log"
        if log.exists() and log.stat().st_size == 0:
            log.unlink()

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        """Kill the process and those that the tracker's own code has started.

        W&B's process is in a session of its own, and would send rows while the next uploader sends them again.
        """
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        process.wait()

    def _spawn(self) -> None:
        self._started = time.monotonic()
        with (self._run_dir / f"{self._tracker.name}.log").open("ab") as log:
            environment = {**self._tracker.environment_defaults, **os.environ, **self._tracker.environment}
            self._process = start(environment, log)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(self._config).encode() + b"\n")
            self._process.stdin.flush()


def main(tracker: str, run_dir: str, live: str | None, uri: str, parent: int) -> int:
    """Run the uploader process; return its exit status: 0 if everything is delivered."""
    # Training has priority.
    with contextlib.suppress(OSError):
        os.nice(10)

    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ended, parent), daemon=True).start()
    with _only_one_in(Path(run_dir), tracker):
        return UploadLoop(TRACKERS[tracker], Path(run_dir), live, uri).repeat_until(ended)


class UploadLoop:
    """The loop of an uploader over the event queues of a run's directory."""

    def __init__(self, tracker: Tracker, run_dir: Path, live: str | None, uri: str) -> None:
        self._tracker = tracker
        self._run_dir = run_dir
        self._live = live
        self._uri = uri
        self._destination = without_credentials(uri)
        self._delivery: Delivery | None = None
        self._opened: Path | None = None
        # The bytes of the opened queue that the client has. They count as delivered when the client confirms them.
        self._sent = 0
        self._progress = Progress.load(run_dir, tracker.name)

    def repeat_until(self, ended: threading.Event) -> int:
        """Deliver repeatedly until training has ended, and then once more."""
        pause_s = POLL_S
        while True:
            last = ended.is_set()
            try:
                self._deliver_all(last)
                pause_s = POLL_S
            except Exception as error:
                self._give_up_unconfirmed()
                self._save(replace(self._progress, error=_describe(error)))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if last:
                return 0 if self._progress.error is None else 1
            ended.wait(pause_s)

    def _deliver_all(self, last: bool) -> None:
        for queue in event_queue.pending(self._run_dir, self._tracker.name):
            # A later attempt has its own uploader.
            if self._live and queue.name > self._live:
                return

            start = event_queue.first_record(queue)
            is_live = queue.name == self._live and not last
            if start is None and is_live:
                return
            if start is not None and start["uri"] != self._destination:
                continue
            if start is not None:
                self._deliver_queue(queue, start)
            if not is_live:
                self._finish(queue)

    def _deliver_queue(self, queue: Path, start: event_queue.Record) -> None:
        delivery = self._connect()
        if self._opened != queue:
            delivery.start(start)
            self._opened = queue
            self._sent = self._progress.delivered.get(queue.name, 0)
            state = delivery.state()
            self._save(replace(self._progress, key=start["key"], run_id=delivery.run_id, error=None, state=state))
        for batch, position in delivery.batches(event_queue.read(queue, self._sent)):
            delivery.deliver(batch)
            self._sent = position
            if delivery.confirms_each_batch:
                progress = self._progress.at(queue, position)
                self._save(replace(progress, dropped=tuple(delivery.dropped), state=delivery.state()))
        if self._progress.error is not None:
            self._save(replace(self._progress, error=None))

    def _finish(self, queue: Path) -> None:
        """Close the run and delete a queue that is delivered and has no writer any more."""
        progress = self._progress
        if self._opened == queue:
            delivery = self._connect()
            delivery.finish()
            progress = replace(progress, dropped=tuple(delivery.dropped), state=delivery.state(), error=None)
            if not delivery.confirms_each_batch:
                self._delivery = self._opened = None
        self._save(progress.without(queue))
        event_queue.remove(queue)

    def _connect(self) -> Delivery:
        if self._delivery is None:
            self._delivery = self._tracker.connect(self._uri, self._progress, self._run_dir)
        return self._delivery

    def _give_up_unconfirmed(self) -> None:
        """Close a connection that failed if its records may be lost. The next attempt delivers them again."""
        if self._delivery is not None and not self._delivery.confirms_each_batch:
            self._delivery.abandon()
            self._delivery = self._opened = None

    def _save(self, progress: Progress) -> None:
        self._progress = progress
        progress.save(self._run_dir, self._tracker.name)


def _describe(error: Exception) -> str:
    return without_credentials(f"{type(error).__name__}: {error}")[:500]


def _wait_for_end(ended: threading.Event, parent: int) -> None:
    """Set `ended` when the training process sends a line, closes the pipe, or is no longer the parent."""
    while os.getppid() == parent:
        ready, _, _ = select.select([0], [], [], POLL_S)
        if ready:
            break
    ended.set()


@contextlib.contextmanager
def _only_one_in(run_dir: Path, tracker: str) -> Iterator[None]:
    # Windows has no fcntl, and this module must import there.
    import fcntl

    with (run_dir / f".{tracker}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
