"""A Hugging Face Hub on loopback, with what `huggingface_hub` asks of it to read files.

It answers as the Hub's documentation says: a revision becomes a commit, a listing comes in pages, a missing thing has an
`X-Error-Code`, and a large file is a redirect to another server.
"""

from __future__ import annotations

import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from .servers import LoopbackServer

PAGE = 3


class Hub(LoopbackServer):
    """The server. Each branch of a repository is a directory; a commit is its content when it was added.

    Attributes:
        requests: method and path of each request.
        token: what a private repository asks for; empty if all are public.
        gated: True if the owner of the repository must grant access.
        fail: the number of reads that are answered with 503 from now on.
        busy: the number of reads that are answered with 429 from now on: come back in a second.
        signature: what the storage expects in an address. A change makes those that were given before expire.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.token, self.gated, self.fail, self.busy, self.signature = "", False, 0, 0, "1"
        self._branches: dict[tuple[str, str], str] = {}
        self._commits: dict[str, dict[str, bytes]] = {}
        super().__init__()

    def push(self, repository: str, directory: Path, branch: str = "main") -> str:
        """Commit a directory as the newest content of a branch. Gives the commit.

        Args:
            repository: such as `datasets/owner/name`.
            directory: the files.
            branch: the branch.
        """
        files = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self._commits[commit] = files
        self._branches[repository, branch] = commit
        return commit

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        url = urlsplit(request.path)
        path = unquote(url.path)
        self.requests.append(f"{request.command} {path}")
        if match := re.fullmatch(r"/cdn/(\w{40})/(.*)", path):
            assert "Authorization" not in request.headers or not self.token, "a token is for the Hub alone"
            if url.query != f"signature={self.signature}":
                self._send(request, 403, b"<Error>expired</Error>")
            else:
                self._send_range(request, self._commits[match[1]][match[2]])
            return
        if self.gated:
            self._refuse(request, 403, "GatedRepo")
        elif self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            self._refuse(request, 401, "RepoNotFound")
        elif match := re.fullmatch(r"/api/((?:datasets|models)/[^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._about(request, match[1], match[2] or "main")
        elif match := re.fullmatch(r"/api/\w+/[^/]+/[^/]+/(tree|paths-info)/(\w{40})(?:/(.*))?", path):
            files = self._commits[match[2]]
            if match[1] == "tree":
                self._tree(request, files, (match[3] or "").strip("/"), parse_qs(url.query))
            else:
                self._paths(request, files, parse_qs(body.decode())["paths"])
        elif match := re.fullmatch(r"/(?:datasets/)?[^/]+/[^/]+/resolve/(\w{40})/(.*)", path):
            self._resolve(request, match[1], match[2])
        else:
            self._refuse(request, 404, "EntryNotFound")

    def _about(self, request: BaseHTTPRequestHandler, repository: str, revision: str) -> None:
        if not any(name == repository for name, _ in self._branches):
            # The Hub doesn't tell whether a repository is private or doesn't exist.
            self._refuse(request, 401, "RepoNotFound")
            return
        commit = self._branches.get((repository, revision), revision)
        if commit not in self._commits:
            self._refuse(request, 404, "RevisionNotFound")
            return
        self._send_json(request, {"id": repository.partition("/")[2], "sha": commit, "siblings": []})

    def _tree(
        self, request: BaseHTTPRequestHandler, files: dict[str, bytes], path: str, query: dict[str, list[str]]
    ) -> None:
        prefix = f"{path}/" if path else ""
        below = [name for name in files if name.startswith(prefix)]
        if not below:
            self._refuse(request, 404, "EntryNotFound")
            return
        directories = {str(parent) for name in below for parent in Path(name).parents} - {".", path}
        names = sorted([*below, *(name for name in directories if name.startswith(prefix))])
        if query.get("recursive", ["false"])[0].lower() not in ("true", "1"):
            names = [name for name in names if "/" not in name.removeprefix(prefix)]
        start = int(query.get("cursor", ["0"])[0])
        headers = {}
        if start + PAGE < len(names):
            address = urlsplit(request.path).path
            recursive = query.get("recursive", ["false"])[0]
            headers["Link"] = f'<{self.url}{address}?recursive={recursive}&cursor={start + PAGE}>; rel="next"'
        self._send_json(request, [_entry(name, files.get(name)) for name in names[start : start + PAGE]], headers)

    def _paths(self, request: BaseHTTPRequestHandler, files: dict[str, bytes], paths: list[str]) -> None:
        entries = []
        for path in paths:
            if path in files or any(name.startswith(f"{path}/") for name in files):
                entries.append(_entry(path, files.get(path)))
        self._send_json(request, entries)

    def _resolve(self, request: BaseHTTPRequestHandler, commit: str, path: str) -> None:
        if self.fail:
            self.fail -= 1
            self._send(request, 503, b"")
            return
        if self.busy:
            self.busy -= 1
            self._send(request, 429, b"", {"RateLimit": '"resolvers";r=0;t=0'})
            return
        content = self._commits[commit].get(path)
        if content is None:
            self._refuse(request, 404, "EntryNotFound")
        elif len(content) > 1000:
            # Another name of this machine stands for another server.
            port = self._server.server_port
            self._send(
                request,
                302,
                b"",
                {"Location": f"http://localhost:{port}/cdn/{commit}/{path}?signature={self.signature}"},
            )
        else:
            self._send_range(request, content)

    def _send_range(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range") or "")
        if match is None:
            self._send(request, 200, content)
            return
        first, last = int(match[1]), min(int(match[2]), len(content) - 1)
        self._send(request, 206, content[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(content)}"})

    def _refuse(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        self._send(request, status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send_json(self, request: BaseHTTPRequestHandler, value: Any, headers: dict[str, str] | None = None) -> None:
        self._send(request, 200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        request.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)


def _entry(path: str, content: bytes | None) -> dict[str, Any]:
    if content is None:
        return {"type": "directory", "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0, "path": path}
    entry = {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": path}
    if len(content) > 1000:
        # Large files are in LFS: the blob is a pointer, and the checksum is that of the content.
        sha = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 130}
    return entry
