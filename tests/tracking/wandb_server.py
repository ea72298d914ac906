"""A server on loopback that speaks W&B's protocol as far as W&B's own code needs it to log a run.

It keeps what a run has sent: rows with their offsets, as W&B's server does, the parameters, the summary, and files. It may
misbehave on purpose:

    hang     accept requests, and answer none until the mode changes
    refuse   answer each request with an error of the server
    lose     confirm rows and their summary without keeping them
    babble   answer with JSON that has nothing of what was asked for
"""

from __future__ import annotations

import contextlib
import gzip
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ports import free_port


class Run:
    """What the server has of one run."""

    def __init__(self) -> None:
        self.lines: dict[str, dict[int, str]] = {}
        self.config: dict[str, Any] = {}
        self.fields: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.files: dict[str, bytes] = {}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the history in their order."""
        lines = self.lines.get("wandb-history.jsonl", {})
        return [json.loads(lines[offset]) for offset in sorted(lines)]

    def curve(self, name: str) -> list[tuple[int, float]]:
        """The points of a metric: the step of the training, and the value."""
        return [(row["trainer/global_step"], row[name]) for row in self.rows if name in row]


class WandbServer:
    """The server. It may be stopped and started again on the same port, with the same runs."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.runs: dict[str, Run] = {}
        self.mode = "work"
        self.requests = 0
        self.answering = threading.Event()
        self._server: ThreadingHTTPServer | None = None

    @property
    def run(self) -> Run:
        """The only run."""
        (run,) = self.runs.values()
        return run

    def start(self) -> None:
        """Answer on the port."""
        handler = type("BoundHandler", (Handler,), {"world": self})
        self._server = Listener(("127.0.0.1", self.port), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        self.answering.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def behave(self, mode: str) -> None:
        """Change the mode. Requests that hang are answered when it changes."""
        self.mode = mode
        if mode == "hang":
            self.answering.clear()
        else:
            self.answering.set()

    def query(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Answer a GraphQL query."""
        name = variables.get("name") or variables.get("run")
        if "upsertBucket" in query:
            return self._upsert(name, variables)
        if "createRunFiles" in query:
            files = [{"name": file, "uploadUrl": f"{self.url}/storage/{name}/{file}"} for file in variables["files"]]
            return {"createRunFiles": {"runID": name, "uploadHeaders": [], "files": files}}
        if "historyTail" in query:
            return {
                "model": {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}, "bucket": self._resume(name)}
            }
        if "viewer" in query:
            return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if "project(" in query:
            return {"project": {"internalId": "p", "readOnly": False, "run": self._run(name)}}
        return {}

    def _upsert(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
        is_new = name not in self.runs
        run = self.runs.setdefault(name, Run())
        run.fields |= {key: value for key, value in variables.items() if value is not None}
        run.config |= json.loads(variables.get("config") or "{}")
        bucket = {
            "id": f"id-{name}", "name": name, "displayName": run.fields.get("displayName"), "description": None,
            "config": json.dumps(run.config), "sweepName": None, "historyLineCount": len(run.rows),
            "project": {"id": "p", "name": run.fields["project"], "entity": {"id": "e", "name": "me"}},
        }  # fmt: skip
        return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}

    def _resume(self, name: str) -> dict[str, Any] | None:
        run = self.runs.get(name)
        if run is None:
            return None
        lines = run.lines.get("wandb-history.jsonl", {})
        summary = run.lines.get("wandb-summary.json", {0: "{}"})
        return {
            "id": f"id-{name}", "name": name, "summaryMetrics": summary[0], "displayName": None, "logLineCount": 0,
            "historyLineCount": len(lines), "eventsLineCount": 0, "eventsTail": "[]", "config": json.dumps(run.config),
            "historyTail": json.dumps([lines[max(lines)]] if lines else []), "tags": [], "notes": None,
            "wandbConfig": json.dumps({"t": 1}),
        }  # fmt: skip

    def _run(self, name: str) -> dict[str, Any] | None:
        run = self.runs.get(name)
        if run is None:
            return None
        last = max((row["_step"] for row in run.rows), default=-1)
        return {
            "id": f"id-{name}", "name": name, "displayName": name, "state": "finished", "config": json.dumps(run.config),
            "systemMetrics": "{}", "summaryMetrics": "{}", "historyKeys": {"lastStep": last, "keys": {}}, "tags": [],
            "createdAt": "2026-01-01T00:00:00Z", "heartbeatAt": "2026-01-01T00:00:00Z", "description": "", "notes": "",
            "sweepName": None, "group": None, "jobType": None, "commit": None, "readOnly": False, "projectId": "1",
            "user": {"name": "me", "username": "me"}, "historyLineCount": len(run.rows),
        }  # fmt: skip


class Listener(ThreadingHTTPServer):
    """The socket. A client that dies is no error."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    world: WandbServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.world.requests += 1
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.world.mode == "hang":
            self.world.answering.wait()
        if self.world.mode == "refuse":
            self._answer({"error": "out of order"}, 500)
        elif self.world.mode == "babble":
            self._answer({"data": {"weather": "rain"}})
        elif self.path.endswith("/graphql"):
            asked = json.loads(body)
            self._answer({"data": self.world.query(asked["query"], asked.get("variables") or {})})
        elif self.path.endswith("/file_stream"):
            self._stream(json.loads(body))
        else:
            self._answer({})

    def do_PUT(self) -> None:
        _, _, name, file = self.path.split("/", 3)
        self.world.runs[name].files[file] = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer({})

    def _stream(self, body: dict[str, Any]) -> None:
        run = self.world.runs[self.path.split("/")[-2]]
        for file, chunk in (body.get("files") or {}).items():
            if self.world.mode == "lose":
                continue
            kept = run.lines.setdefault(file, {})
            kept.update(enumerate(chunk["content"], chunk["offset"]))
        if body.get("complete"):
            run.exit_code = body.get("exitcode")
        self._answer({})

    def _answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass
