"""The parts of Vertex AI and Cloud Logging that a job uses, on loopback.

It is written from Google's documentation and checks only our side: that requests are valid by Google's protos
(`test_vertex_request.py`), and that we handle all answers of a service: late, twice, with 503 or no answer.

Replicas of a CustomJob are processes of this machine (`vertex_machines.py`). Their output becomes log entries. The job ends
with its master, with the first replica that fails, at its time-out, when it is cancelled, or with a machine.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jobs.backends.vertex_machines import Replicas

JOBS = re.compile(r"/v1/(projects/([^/]+)/locations/([^/]+)/customJobs)")
JOB = re.compile(r"/v1/(projects/[^/]+/locations/[^/]+/customJobs/\d+)(:cancel)?")
PAGE = 100
GRACE_S = 30.0  # between SIGTERM and SIGKILL
ENDED = ("JOB_STATE_SUCCEEDED", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED")


_numbers = itertools.count(4_000_000_000)


@dataclass
class Trouble:
    """A fault in the next requests that match.

    Attributes:
        method, path: the requests that match; the path is a pattern that is searched for.
        answer: the status and error of the answer; None closes the connection without an answer.
        done: carry out the request anyway.
        times: the number of requests with this fault.
    """

    method: str
    path: str
    answer: tuple[int, dict[str, Any]] | None
    done: bool = False
    times: int = 1


def error(code: int, message: str = "", status: str = "", **info: str) -> tuple[int, dict[str, Any]]:
    """A Google error response."""
    body: dict[str, Any] = {"code": code, "message": message, "status": status}
    if info:
        body["details"] = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "domain": "googleapis.com", **info}]
    return code, {"error": body}


@dataclass
class Run:
    """A CustomJob and its state."""

    resource: dict[str, Any]
    cancelled: threading.Event = field(default_factory=threading.Event)
    lost: threading.Event = field(default_factory=threading.Event)

    @property
    def ident(self) -> str:
        return self.resource["name"].rpartition("/")[2]


class Cloud:
    """The services' state.

    Attributes:
        runs: the CustomJobs, in the order of creation.
        requests: all requests so far: method, path, headers, body.
        troubles: the faults to come.
        page: the largest number of entries in one answer of Cloud Logging.
        executes: True if CustomJobs run.

    Args:
        storage: host and port of Cloud Storage.
        directory: the disks of its machines.
    """

    def __init__(self, storage: str, directory: Path) -> None:
        self.runs: list[Run] = []
        self.entries: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.troubles: list[Trouble] = []
        self.page = PAGE
        self.executes = True
        self._storage = storage
        self._directory = directory
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []

    def renew(self) -> None:
        """Stop everything that runs, and clear the state."""
        self.close()
        for collection in (self.runs, self.entries, self.requests, self.troubles, self._threads):
            collection.clear()
        self.page, self.executes = PAGE, True

    def asked(self, method: str, path: str) -> list[Any]:
        """The bodies of requests so far."""
        return [body for verb, where, _, body in self.requests if verb == method and re.search(path, where)]

    def say(self, run: Run, task: str, text: str, at: int | None = None, **more: Any) -> None:
        """Add a log entry."""
        with self._lock:
            stamp = _stamp(time.time_ns() if at is None else at)
            self.entries.append({
                "insertId": f"{len(self.entries):08d}", "timestamp": stamp, "receiveTimestamp": stamp, "severity": "INFO",
                "logName": f"projects/p/logs/{task}",
                "resource": {"type": "ml_job", "labels": {"job_id": run.ident, "task_name": task, "project_id": "p"}},
                **({} if "textPayload" in more else {"jsonPayload": {"message": text, "levelname": "INFO"}}),
                **more,
            })  # fmt: skip

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, dict[str, Any]]:
        """The response to a request."""
        with self._lock:
            if method == "POST" and path == "/v2/entries:list":
                return 200, self._entries(body)
            if match := JOB.fullmatch(path):
                run = next((candidate for candidate in self.runs if candidate.resource["name"] == match[1]), None)
                if run is None:
                    return error(404, "CustomJob does not exist.", "NOT_FOUND")
                if not match[2]:
                    return 200, dict(run.resource)  # a copy of the current state
                if run.resource["state"] in ENDED:
                    return error(400, "The job has ended.", "FAILED_PRECONDITION")
                run.resource["state"] = "JOB_STATE_CANCELLING"
                run.cancelled.set()
                return 200, {}
            if match := JOBS.fullmatch(path):
                return (
                    (200, self._list(query)) if method == "GET" else (200, dict(self.create(match[1], body).resource))
                )
        return error(404, "no such method", "NOT_FOUND")

    def create(self, parent: str, body: dict[str, Any]) -> Run:
        name = f"{parent}/{next(_numbers)}"
        made = {**body, "name": name, "state": "JOB_STATE_QUEUED", "createTime": _stamp(time.time_ns())}
        run = Run(made)
        self.runs.append(run)
        if self.executes:
            thread = threading.Thread(target=self._execute, args=(run,))
            self._threads.append(thread)
            thread.start()
        return run

    def close(self) -> None:
        """Lose all machines. Return when all their processes are gone."""
        for run in self.runs:
            run.lost.set()
        for thread in self._threads:
            thread.join(60)

    def _list(self, query: dict[str, str]) -> dict[str, Any]:
        match = re.fullmatch(r"labels\.([a-z_]+)=([a-z0-9_-]+)", query["filter"])
        assert match, query
        names = [dict(run.resource) for run in self.runs if run.resource.get("labels", {}).get(match[1]) == match[2]]
        at = int(query.get("pageToken", 0))
        more = {"nextPageToken": str(at + 1)} if len(names) > at + 1 else {}
        return {"customJobs": names[at : at + 1], **more} if names else {}

    def _entries(self, body: dict[str, Any]) -> dict[str, Any]:
        match = re.fullmatch(
            r'resource\.type="ml_job" AND resource\.labels\.job_id="(\d+)" AND timestamp>="([^"]+)"', body["filter"]
        )
        assert match, body
        assert body["orderBy"] == "timestamp asc"
        fitting = [
            entry
            for entry in self.entries
            if entry["resource"]["labels"]["job_id"] == match[1] and entry["timestamp"] >= match[2]
        ]
        fitting.sort(key=lambda entry: (entry["timestamp"], entry["insertId"]))
        at, size = int(body.get("pageToken", 0)), min(self.page, body["pageSize"])
        more = {"nextPageToken": str(at + size)} if len(fitting) > at + size else {}
        return {"entries": fitting[at : at + size], **more} if fitting else {}

    def _execute(self, run: Run) -> None:
        """Run a job from its start to its end."""
        with tempfile.TemporaryDirectory(dir=self._directory) as scratch:
            try:
                run.resource["state"] = "JOB_STATE_PENDING"
                self.say(run, "service", "Waiting for job to be provisioned.")
                pools = run.resource["jobSpec"]["workerPoolSpecs"]
                replicas = Replicas(pools, self._storage, Path(scratch), lambda task, line: self.say(run, task, line))
                try:
                    replicas.start()
                    how = self._run(run, replicas)
                finally:
                    replicas.kill()
            except Exception as trouble:  # shown to a test that waits for the job's end
                self._end(run, "JOB_STATE_FAILED", 3, f"The server of the tests has failed: {trouble!r}")
                raise
        self._end(run, *how)

    def _run(self, run: Run, replicas: Replicas) -> tuple[str, int, str]:
        """Run the replicas until the job must end. Return its last state, and the code and message of its error."""
        with self._lock:
            run.resource["startTime"] = _stamp(time.time_ns())
            if not run.cancelled.is_set():
                run.resource["state"] = "JOB_STATE_RUNNING"
        over_at = time.monotonic() + float(run.resource["jobSpec"]["scheduling"]["timeout"].removesuffix("s"))
        while not run.cancelled.is_set() and time.monotonic() < over_at:
            if run.lost.is_set():
                return "JOB_STATE_FAILED", 13, "Internal error occurred for the current attempt."
            ended = replicas.ended()
            if ended.get("workerpool0-0") == 0:
                return "JOB_STATE_SUCCEEDED", 0, ""
            if failed := {task: code for task, code in ended.items() if code}:
                task, code = next(iter(failed.items()))
                number = code if code > 0 else 128 - code
                return "JOB_STATE_FAILED", 3, (
                    f"The replica {task} exited with a non-zero status of {number}. Termination reason: Error. "
                    "To find out more about why your job exited please check the logs: https://console.cloud.google.com/"
                )  # fmt: skip
            time.sleep(0.02)
        replicas.ask()
        kill_at = time.monotonic() + GRACE_S
        while not replicas.all_ended and not run.lost.is_set() and time.monotonic() < kill_at:
            time.sleep(0.02)
        return "JOB_STATE_CANCELLED", 0, ""

    def _end(self, run: Run, state: str, code: int, message: str) -> None:
        with self._lock:
            if code:
                run.resource["error"] = {"code": code, "message": message}
            run.resource["endTime"] = _stamp(time.time_ns())
            run.resource["state"] = state


def _stamp(at: int) -> str:
    return f"{datetime.fromtimestamp(at // 10**9, UTC):%Y-%m-%dT%H:%M:%S}.{at % 10**9:09d}Z"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    cloud: Cloud


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._serve(json.loads(body) if self.headers.get("Content-Type") == "application/json" else None)

    def _serve(self, body: Any) -> None:
        cloud, parts = self.server.cloud, urlsplit(self.path)
        cloud.requests.append((self.command, self.path, dict(self.headers), body))
        trouble = next(
            (
                candidate
                for candidate in cloud.troubles
                if candidate.times and candidate.method == self.command and re.search(candidate.path, self.path)
            ),
            None,
        )
        if trouble:
            trouble.times -= 1
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if trouble is None or trouble.done:
            status, document = cloud.answer(self.command, parts.path, query, body)
        if trouble:
            if trouble.answer is None:
                self.close_connection = True
                return
            status, document = trouble.answer
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serve(cloud: Cloud) -> Iterator[str]:
    """Serve the cloud, and return the address."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.cloud = cloud
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        cloud.close()
