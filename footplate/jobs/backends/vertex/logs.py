"""A CustomJob's output, from Cloud Logging into the attempt's files: no line lost, none twice.

Cloud Logging is asked, not listened to, and what it has of a moment may still grow a little later. So each time it is
asked for what is younger than the youngest entry that is known, less `WINDOW_S`, page by page, and what is known already
is left out. An entry that comes later than that is not seen.

A supervisor may die at any point. So what is to be written is first put into the attempt's note, with the sizes that the
files have then; then it is written. Whoever takes the attempt up finds in the sizes how much of it has been.

    workerpool0-0, workerpool1-2, …    master-0.log, worker-2.log, …
    service                            prepare.log: what Vertex AI itself says, of machines and images
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from footplate.jobs.backends.vertex.attempt_record import RecordFile
from footplate.jobs.backends.vertex.client import Client
from footplate.jobs.backends.vertex.outcome import replica
from footplate.jobs.backends.vertex.timestamps import SECOND, to_text, to_time
from footplate.jobs.supervision.logfiles import Writer, size

WINDOW_S = 60
PAGE = 1000  # entries; as many as it gives at once
PAGES = 20  # for one call; what is left comes with the next


class Output:
    """The files of an attempt, and what of the log is in them.

    Attributes:
        longest_delay_s: between an entry's time and its arrival at Cloud Logging.

    Args:
        record_file: the attempt's, in whose folder the files are.
    """

    def __init__(self, record_file: RecordFile) -> None:
        self.longest_delay_s = 0.0
        self._record_file = record_file
        self._writers: dict[str, Writer] = {}
        self._more: Mapping[str, Any] | None = None  # the request for the next page, when there is one
        self._append()

    @property
    def more(self) -> bool:
        """Whether Cloud Logging has said that there is more."""
        return self._more is not None

    def fetch(self, client: Client, job: str) -> int:
        """Take what is new; returns how many entries.

        Args:
            client: who asks.
            job: the CustomJob's name.

        Raises:
            Unanswered: perhaps later.
            Refused: never.
            OSError: it can't be kept.
        """
        count = 0
        for _ in range(PAGES):
            asked: Mapping[str, Any] = self._more or self._from_newest(job)
            self._more = None
            page = client.ask("logging", "POST", "/v2/entries:list", asked)
            count += self.add(page.get("entries", []))
            if not page.get("nextPageToken"):
                break
            self._more = {**asked, "pageToken": page["nextPageToken"]}
        return count

    def _from_newest(self, job: str) -> dict[str, Any]:
        since = max(0, self._record_file.record.newest - WINDOW_S * SECOND)
        about = f'resource.type="ml_job" AND resource.labels.job_id="{job.rpartition("/")[2]}"'
        return {
            "resourceNames": [f"projects/{job.split('/')[1]}"],
            "filter": f'{about} AND timestamp>="{to_text(since)}"',
            "orderBy": "timestamp asc",
            "pageSize": PAGE,
        }

    def add(self, entries: Iterable[dict[str, Any]]) -> int:
        """Write the entries that are new; returns how many.

        Raises:
            OSError: they can't be written; the next time they are tried again.
        """
        self._append()
        note = self._record_file.record
        known, newest, pieces, count = set(note.known), note.newest, dict[str, str](), 0
        for entry in entries:
            at, ident = to_time(entry["timestamp"]), f"{entry['timestamp']}/{entry.get('insertId', '')}"
            if ident in known:
                continue
            known.add(ident)
            newest, count = max(newest, at), count + 1
            self.longest_delay_s = max(self.longest_delay_s, (to_time(entry.get("receiveTimestamp", "")) - at) / SECOND)
            file = file_of(entry)
            pieces[file] = pieces.get(file, "") + text_of(entry)
        if not count:
            return 0
        young = newest - WINDOW_S * SECOND
        kept = tuple(one for one in known if to_time(one.partition("/")[0]) >= young)
        pending = {name: (size(self._record_file.folder / name), text) for name, text in pieces.items()}
        self._record_file.change(newest=newest, known=kept, pending=pending)
        self._append()
        return count

    def last_line(self, role: str, index: int) -> str:
        """What a replica has said last."""
        name = f"{role}-{index}.log"
        return self._writer(name).last_line() if (self._record_file.folder / name).exists() else ""

    def close(self) -> None:
        """End the files."""
        for one in self._writers.values():
            one.close()
        self._writers.clear()

    def _append(self) -> None:
        """Write what is pending, less what is written already."""
        for name, (before, text) in self._record_file.record.pending.items():
            rest = text.encode()[size(self._record_file.folder / name) - before :]
            if rest:
                self._writer(name).write(rest)

    def _writer(self, name: str) -> Writer:
        if name not in self._writers:
            self._writers[name] = Writer(self._record_file.folder / name)
        return self._writers[name]


def file_of(entry: dict[str, Any]) -> str:
    """The file to which an entry belongs."""
    task = (entry.get("resource") or {}).get("labels", {}).get("task_name", "")
    found = replica(task)
    return f"{found[0]}-{found[1]}.log" if found else "prepare.log"


def text_of(entry: dict[str, Any]) -> str:
    """The line, or lines, of an entry."""
    payload = entry.get("jsonPayload")
    text = entry.get("textPayload")
    if text is None and isinstance(payload, dict):
        text = payload.get("message")
        if not isinstance(text, str):
            text = json.dumps(payload, sort_keys=True)
    whole = str(text or "").encode("utf-8", "replace").decode()  # JSON may hold half a character
    return whole.rstrip("\n") + "\n"
