"""An S3 server on loopback for local files, each of whose answers takes some time longer, as from a server far away.

    with object_store.serve(directory, latency_ms=50):
        ...                                         # s3://lake/NAME is directory / NAME

It only answers what readers ask: an object, a range of it, its size, and the names below a prefix. It sends files without a
copy in Python, so it takes little of the processors that the readers are measured on. Requests wait beside each other: a
client that asks for several things at once waits once. The rate of the bytes isn't limited.

The server is a process of its own, so that it doesn't share Python's lock with a reader.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "lake"


@contextlib.contextmanager
def serve(directory: Path, latency_ms: float) -> Iterator[None]:
    """Serve the files of a directory, and set the variables by which clients find the server.

    Args:
        directory: its files are the objects of the bucket. They must not change.
        latency_ms: how much longer each answer takes, in milliseconds.
    """
    command = [sys.executable, __file__, str(directory), str(latency_ms)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    before = dict(os.environ)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        if not url:
            raise SystemExit("The S3 server didn't start.")
        os.environ |= {
            "AWS_ENDPOINT_URL": url,
            "S3_ENDPOINT_URL": url,  # of Mosaic Streaming
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.kill()
        server.wait()


class _Objects(BaseHTTPRequestHandler):
    """Answers requests for the files of `directory`, which `main` sets, as is `latency_s`."""

    protocol_version = "HTTP/1.1"
    directory: Path
    latency_s: float

    def handle(self) -> None:
        # A reader that ends early closes its connections.
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        time.sleep(self.latency_s)
        address = urlsplit(self.path)
        key = unquote(address.path).strip("/").removeprefix(BUCKET).strip("/")
        file = self.directory / key
        if not key:
            self._send_text(200, self._listing(parse_qs(address.query)), with_body)
        elif file.is_file():
            self._send_file(file, with_body)
        else:
            self._send_text(404, "<Error><Code>NoSuchKey</Code></Error>", with_body)

    def _send_file(self, file: Path, with_body: bool) -> None:
        status = file.stat()
        start, stop = 0, status.st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            start, stop = int(asked[1]), min(int(asked[2] or stop) + 1, stop)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{status.st_size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{status.st_mtime_ns:x}"')
        self.send_header("Last-Modified", formatdate(status.st_mtime, usegmt=True))
        self.end_headers()
        self.wfile.flush()
        with file.open("rb") as opened:
            while with_body and start < stop:
                start += os.sendfile(self.connection.fileno(), opened.fileno(), start, stop - start)

    def _listing(self, query: dict[str, list[str]]) -> str:
        """The objects below a prefix; those below a further delimiter as one common prefix."""
        prefix, delimiter = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
        folder = self.directory / prefix.rpartition("/")[0]
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        objects, common = [], set()
        for file in files:
            key = str(file.relative_to(self.directory))
            if not key.startswith(prefix):
                continue
            below, further, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if further:
                common.add(prefix + below + further)
                continue
            status = file.stat()
            changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
            objects.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{status.st_size}</Size><LastModified>{changed}</LastModified>"
                f"<ETag>&quot;{status.st_mtime_ns:x}&quot;</ETag></Contents>"
            )
        prefixes = [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(common)]
        body = "".join([*objects, *prefixes])
        return (
            f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{BUCKET}</Name>'
            f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(objects) + len(common)}</KeyCount>"
            f"<IsTruncated>false</IsTruncated>{body}</ListBucketResult>"
        )

    def _send_text(self, status: int, text: str, with_body: bool) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    """Print the server's address, and serve until the process is killed."""
    _Objects.directory, _Objects.latency_s = Path(sys.argv[1]), float(sys.argv[2]) / 1000
    server = _Server(("127.0.0.1", 0), _Objects)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
