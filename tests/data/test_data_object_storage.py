"""Tables on S3 and Google Cloud Storage, against real servers on loopback."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from footplate.data import Loader, Table
from footplate.data.location import locate
from footplate.errors import DataError

from .conftest import image_rows, png

pytestmark = pytest.mark.engine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(command: list[str], url: str) -> Iterator[str]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(url, timeout=1)
            except urllib.error.HTTPError:
                break
            except OSError:
                assert process.poll() is None, f"{command} ended with {process.returncode}"
                time.sleep(0.1)
            else:
                break
        yield url
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    port = free_port()
    yield from serve(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], f"http://127.0.0.1:{port}"
    )


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{s3_server}/lake", method="PUT"))
    return "s3://lake"


@pytest.fixture(scope="module")
def gcs_server() -> Iterator[str]:
    port = free_port()
    command = ["gcp-storage-emulator", "start", "--host", "127.0.0.1", "--port", str(port), "--in-memory"]
    command[0] = str(Path(sys.executable).with_name(command[0]))
    yield from serve([*command, "--default-bucket", "lake"], f"http://127.0.0.1:{port}")


@pytest.fixture
def gcs(gcs_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server)
    return "gs://lake"


def upload(uri: str, directory: Path) -> None:
    place = locate(uri)
    for path in directory.rglob("*"):
        if path.is_file():
            target = f"{place.path}/{path.relative_to(directory)}"
            with place.filesystem.open_output_stream(target) as stream:
                stream.write(path.read_bytes())


def ids(table: Table) -> list[int]:
    return sorted(number for batch in Loader(table, 16, shuffle=True) for number in batch["id"].tolist())


def test_a_delta_table_on_s3(s3: str) -> None:
    uri = f"{s3}/delta"
    options = {"AWS_ALLOW_HTTP": "true"}
    for start in (0, 50):
        write_deltalake(uri, image_rows(start, start + 50), mode="append", storage_options=options)
    DeltaTable(uri, storage_options=options).delete("id < 20")
    table = Table(uri)
    assert (table.kind, table.version) == ("delta", 2)
    assert ids(table) == list(range(20, 100))
    assert ids(Table(uri, version=1)) == list(range(100))
    assert ids(pickle.loads(pickle.dumps(table))) == list(range(20, 100))


def test_parquet_images_and_globs_on_s3(s3: str, tmp_path: Path) -> None:
    for part in range(3):
        pq.write_table(image_rows(part * 10, part * 10 + 10), tmp_path / f"part {part}.parquet")
    upload(f"{s3}/plain", tmp_path)
    assert ids(Table(f"{s3}/plain")) == list(range(30))
    assert ids(Table(f"{s3}/plain/part%20[01].parquet")) == list(range(20))
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "1.png").write_bytes(png(1))
    upload(f"{s3}/photos", tmp_path / "photos")
    assert Table(f"{s3}/photos").head().to_pylist()[0]["label_name"] == "cat"


@pytest.mark.slow
def test_nothing_or_no_one_on_s3(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="there is nothing"):
        Table(f"{s3}/missing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(DataError, match="can't be reached"):
        Table(f"{s3}/delta")


def test_parquet_on_google_cloud_storage(gcs: str, tmp_path: Path) -> None:
    pq.write_table(image_rows(0, 30), tmp_path / "a.parquet", row_group_size=10)
    upload(f"{gcs}/plain", tmp_path)
    assert ids(Table(f"{gcs}/plain/a.parquet")) == list(range(30))
    assert ids(Table(f"{gcs}/plain")) == list(range(30))
