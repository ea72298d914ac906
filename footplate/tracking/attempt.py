"""One attempt of a run in the training process: a background writer, its event queue, and its uploader.

attempt = Attempt(MLFLOW, run_dir, uri)
attempt.put("metrics", step=1, values={"loss": 0.5})     # from the training loop; never blocks
attempt.close(300.0)                                     # delivers within a limited time, warns about the rest
"""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path
from typing import Any

from footplate.core.errors import ConfigError
from footplate.tracking import event_queue
from footplate.tracking.base import Status
from footplate.tracking.event_queue import Progress, Record
from footplate.tracking.media import Media
from footplate.tracking.parameters import without_credentials
from footplate.tracking.trackers import Tracker
from footplate.tracking.uploader import Uploader
from footplate.tracking.writer import BackgroundWriter

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S: dict[Status, float] = {"success": 300.0, "failed": 30.0, "interrupted": 10.0}


class Attempt:
    """The attempt. It starts when it is made, and ends with `close`.

    Raises:
        ConfigError: the run's directory can't be written to.
    """

    def __init__(self, tracker: Tracker, run_dir: Path, uri: str) -> None:
        _require_writable(tracker.title, run_dir)
        self._tracker = tracker
        self._run_dir = run_dir
        self._uri = without_credentials(uri)
        self._queue = event_queue.next_queue(run_dir, tracker.name)
        self._uploader = Uploader(run_dir, self._queue, uri, tracker)
        self._reported: str | None = None
        self._files = 0
        self._writer = BackgroundWriter(tracker.name, self._write)
        self.model_dir = run_dir / f"{tracker.name}-model-{self._queue.stem.rpartition('-')[2]}"

    def put(self, kind: str, **fields: Any) -> None:
        """Queue a record."""
        self._writer.put({"kind": kind, "time_ms": time.time_ns() // 1_000_000, **fields})

    def put_media(self, media: Media, step: int) -> None:
        """Queue a value that isn't a float. The writer's thread writes its file."""
        self._files += 1
        path = event_queue.files_of(self._queue) / f"{self._files:06d}" / media.file_name(step)
        key = f"{media.key}/{media.index}" if media.index else media.key
        fields = {"media": media.kind, "key": key, "caption": media.caption, "path": str(path.resolve())}
        self.put("media", step=step, file=media.data, **fields)

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Write all records to the event queue."""
        self._writer.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Deliver within a limited time, and log a warning about undelivered records."""
        self._writer.close(timeout_s)
        self._uploader.close(timeout_s)
        title = self._tracker.title
        progress = Progress.load(self._run_dir, self._tracker.name)
        if self._queue.exists():
            reason = progress.error or f"it took longer than {timeout_s:.0f} s"
            log.warning(
                "%s at %s did not receive all of this run (%s). The rest is in %s. It is sent when the run resumes, "
                "or with footplate.tracking.%s.deliver_pending(%r).",
                title, self._uri, reason, self._queue, self._tracker.name, str(self._run_dir),
            )  # fmt: skip
        for note in progress.dropped:
            log.warning("%s refused %s", title, note)

    def _write(self, records: list[Record]) -> None:
        event_queue.append(self._queue, [_with_file(record) for record in records])
        self._uploader.start()
        error = Progress.load(self._run_dir, self._tracker.name).error
        if error and not self._reported:
            log.warning(
                "%s at %s can't be reached (%s). Training continues. Its records are kept in %s and sent later.",
                self._tracker.title, self._uri, error, self._run_dir,
            )  # fmt: skip
        self._reported = error


def _require_writable(title: str, run_dir: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise ConfigError(
            f"The {title} logger can't write into {run_dir}: {error}. Choose another default_root_dir."
        ) from error


def _with_file(record: Record) -> Record:
    """Write the file of a record, and return the record without the file's bytes."""
    if "file" not in record:
        return record
    path = Path(record["path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(record["file"])
    return {name: value for name, value in record.items() if name != "file"}


def deliver(tracker: Tracker, run_dir: Path, uri: str, timeout_s: float) -> bool:
    """Send undelivered records of a directory's runs to a tracker. Return True if everything is delivered."""
    Uploader(run_dir, None, uri, tracker).close(timeout_s)
    return not event_queue.pending(run_dir, tracker.name)
