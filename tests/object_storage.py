"""S3 and Google Cloud Storage servers on loopback, for tests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port


@contextlib.contextmanager
def serve(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server as a context, and enter it once the server answers."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=1)
            except urllib.error.HTTPError:
                break
            except OSError:
                assert process.poll() is None, f"{command} ended with {process.returncode}"
                time.sleep(0.1)
            else:
                break
        yield process
    finally:
        process.kill()
        process.wait(10)


def serve_s3(port: int) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """An S3 server without buckets."""
    return serve([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port)


def serve_gcs(port: int) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """A Google Cloud Storage server with the bucket `lake`."""
    command = Path(sys.executable).with_name("gcp-storage-emulator")
    arguments = ["start", "--host", "127.0.0.1", "--port", str(port), "--in-memory", "--default-bucket", "lake"]
    return serve([str(command), *arguments], port)


def s3_settings(port: int) -> dict[str, str]:
    """The environment variables for the S3 server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }


def make_bucket(port: int, name: str = "lake") -> None:
    """Make a bucket on the S3 server."""
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/{name}", method="PUT"))


@contextlib.contextmanager
def own_bucket(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve a bucket of "s3" or "gs", and set the variables by which it is found. Gives the URI of a directory in it."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        if kind == "s3":
            stack.enter_context(serve_s3(port))
            make_bucket(port)
            settings = s3_settings(port)
        else:
            stack.enter_context(serve_gcs(port))
            settings = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        yield f"{kind}://lake/{uuid.uuid4().hex}"
