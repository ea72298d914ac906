"""Servers of S3, Google Cloud Storage and Azure Blob Storage on loopback, for tests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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


def serve_azure(port: int) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """A server of Azure Blob Storage without containers: Azurite, from npm. It knows one account."""
    program = Path(sys.prefix) / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    assert program.exists(), "Azurite isn't installed; install it with: make system"
    options = ["--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    return serve(["node", str(program), "--blobHost", "127.0.0.1", "--blobPort", str(port), *options], port)


def azure_settings(port: int) -> dict[str, str]:
    """The environment variables for the server of Azure. Its key is the one that all its documents name."""
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
        "AZURE_STORAGE_ACCOUNT_KEY": key,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/devstoreaccount1",
    }


def make_container(port: int, name: str = "lake") -> str:
    """Make a container on the server of Azure. Gives its address."""
    # Import here: it takes a second.
    from azure.storage.blob import ContainerClient

    settings = azure_settings(port)
    server, key = settings["AZURE_STORAGE_ENDPOINT"], settings["AZURE_STORAGE_ACCOUNT_KEY"]
    ContainerClient(server, name, credential=key).create_container()
    return f"abfss://{name}@{settings['AZURE_STORAGE_ACCOUNT_NAME']}.dfs.core.windows.net"


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


@dataclass(frozen=True)
class Bucket:
    """The bucket `lake` of a server.

    Attributes:
        uri: its URI.
        port: the server's port.
        settings: the environment variables by which it is found.
    """

    uri: str
    port: int
    settings: Mapping[str, str]

    def use(self, monkeypatch: pytest.MonkeyPatch) -> str:
        """Set the variables. Gives the URI."""
        for name, value in self.settings.items():
            monkeypatch.setenv(name, value)
        return self.uri


@contextlib.contextmanager
def serve_bucket(kind: str) -> Iterator[Bucket]:
    """Serve a bucket of "s3", "gs" or "azure"."""
    port = free_port()
    if kind == "s3":
        with serve_s3(port):
            make_bucket(port)
            yield Bucket("s3://lake", port, s3_settings(port))
    elif kind == "gs":
        with serve_gcs(port):
            yield Bucket("gs://lake", port, {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"})
    else:
        with serve_azure(port):
            yield Bucket(make_container(port), port, azure_settings(port))


@pytest.fixture(scope="module")
def s3_bucket() -> Iterator[Bucket]:
    with serve_bucket("s3") as bucket:
        yield bucket


@pytest.fixture(scope="module")
def gcs_bucket() -> Iterator[Bucket]:
    with serve_bucket("gs") as bucket:
        yield bucket


@pytest.fixture(scope="module")
def azure_bucket() -> Iterator[Bucket]:
    with serve_bucket("azure") as bucket:
        yield bucket


@contextlib.contextmanager
def own_bucket(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve a bucket, and set the variables by which it is found. Gives the URI of a directory in it."""
    with serve_bucket(kind) as bucket:
        yield f"{bucket.use(monkeypatch)}/{uuid.uuid4().hex}"
