"""Copy a CustomJob's output from Cloud Logging into the attempt's files: no line is lost or written twice.

Cloud Logging is polled. The entries of a moment may still arrive a little later. So each request asks for entries from
`WINDOW_S` before the newest known entry on, page by page, and known entries are skipped. An entry that arrives later than
that is missed.

The supervisor may die at any time. So the text to write is first put into the attempt's record, with the sizes of the
files; then it is written. The supervisor that takes over sees from the sizes how much was written.

    workerpool0-0, workerpool1-2, …    master-0.log, worker-2.log, …
    service                            prepare.log: Vertex AI's own messages about machines and images
    "footplate-trial reports {…}"      reports.jsonl: a report of a tuning's trial, from the output of its master
    "footplate-trial hypertune {…}"    hypertune.jsonl: the same, by `cloudml-hypertune`
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from footplate.jobs.backends.vertex.attempt_record import RecordFile
from footplate.jobs.backends.vertex.bootstrap import MARK
from footplate.jobs.backends.vertex.client import Client
from footplate.jobs.backends.vertex.outcome import replica
from footplate.jobs.backends.vertex.timestamps import SECOND, to_text, to_time
from footplate.jobs.supervision.logfiles import Writer, size
from footplate.jobs.tuning.report_lines import FILES

WINDOW_S = 60
# Entries of a page. This is the largest page that Cloud Logging returns.
PAGE = 1000
# Most pages that a call reads. The next call gets the rest.
PAGES = 20

# The program may have written a part of a line before.
_REPORT = re.compile(rf"(.*){MARK} ({'|'.join(FILES)}) (.*\n)")


class Output:
    """The output files of an attempt, and the log entries that are in them.

    Attributes:
        longest_delay_s: the longest time from an entry's timestamp to its arrival at Cloud Logging.

    Args:
        record_file: the attempt's record. The files are in its folder.
    """

    def __init__(self, record_file: RecordFile) -> None:
        self.longest_delay_s = 0.0
        self._record_file = record_file
        self._writers: dict[str, Writer] = {}
        # The request for the next page, if there is one.
        self._more: Mapping[str, Any] | None = None
        self._append()

    @property
    def more(self) -> bool:
        """True if Cloud Logging has reported more pages."""
        return self._more is not None

    def fetch(self, client: Client, job: str) -> int:
        """Fetch and write new entries. Returns their number.

        Args:
            client: makes the requests.
            job: the CustomJob's name.

        Raises:
            Unanswered: a retry may help.
            Refused: a retry won't help.
            OSError: the entries can't be written.
        """
        count = 0
        for _ in range(PAGES):
            request: Mapping[str, Any] = self._more or self._from_newest(job)
            self._more = None
            page = client.ask("logging", "POST", "/v2/entries:list", request)
            count += self.add(page.get("entries", []))
            if not page.get("nextPageToken"):
                break
            self._more = {**request, "pageToken": page["nextPageToken"]}
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
        """Write the new ones of these entries. Returns their number.

        Raises:
            OSError: they can't be written. The next call tries again.
        """
        self._append()
        record = self._record_file.record
        known, newest, pieces, count = set(record.known), record.newest, dict[str, str](), 0
        for entry in entries:
            at, ident = to_time(entry["timestamp"]), f"{entry['timestamp']}/{entry.get('insertId', '')}"
            if ident in known:
                continue
            known.add(ident)
            newest, count = max(newest, at), count + 1
            self.longest_delay_s = max(self.longest_delay_s, (to_time(entry.get("receiveTimestamp", "")) - at) / SECOND)
            for file, text in files_of(entry):
                pieces[file] = pieces.get(file, "") + text
        if not count:
            return 0

        # The record is written before the files, so that a supervisor that takes over can finish the writing.
        young = newest - WINDOW_S * SECOND
        kept = tuple(ident for ident in known if to_time(ident.partition("/")[0]) >= young)
        pending = {name: (size(self._record_file.folder / name), text) for name, text in pieces.items()}
        self._record_file.change(newest=newest, known=kept, pending=pending)
        self._append()
        return count

    def last_line(self, role: str, index: int) -> str:
        """The last line of a replica's output."""
        name = f"{role}-{index}.log"
        return self._writer(name).last_line() if (self._record_file.folder / name).exists() else ""

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _append(self) -> None:
        """Write the pending text, without the part that is in the files already."""
        for name, (before, text) in self._record_file.record.pending.items():
            rest = text.encode()[size(self._record_file.folder / name) - before :]
            if rest:
                self._writer(name).write(rest)

    def _writer(self, name: str) -> Writer:
        if name not in self._writers:
            self._writers[name] = Writer(self._record_file.folder / name)
        return self._writers[name]


def files_of(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the files of an entry, and the text for each."""
    task = (entry.get("resource") or {}).get("labels", {}).get("task_name", "")
    identity = replica(task)
    file = f"{identity[0]}-{identity[1]}.log" if identity else "prepare.log"
    for line in text_of(entry).splitlines(keepends=True):
        report = _REPORT.fullmatch(line) if file == "master-0.log" else None
        if report is None:
            yield file, line
            continue
        if report[1]:
            yield file, report[1] + "\n"
        yield FILES[report[2]], report[3]


def text_of(entry: dict[str, Any]) -> str:
    """The line, or lines, of an entry."""
    payload = entry.get("jsonPayload")
    text = entry.get("textPayload")
    if text is None and isinstance(payload, dict):
        text = payload.get("message")
        if not isinstance(text, str):
            text = json.dumps(payload, sort_keys=True)
    # JSON may contain half of a surrogate pair.
    whole = str(text or "").encode("utf-8", "replace").decode()
    return whole.rstrip("\n") + "\n"
