"""Tables on S3, Google Cloud Storage and Azure Blob Storage, against real servers on loopback."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from object_storage import Bucket
from ports import free_port

from footplate.core.errors import DataError
from footplate.data import FileCache, Loader, Table
from footplate.data.remote import filesystem
from footplate.data.remote.file_cache import BLOCK_BYTES

from .conftest import image_rows, png
from .servers import Proxy, upload

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry after hundredths of a second. There are as many attempts as usual."""
    monkeypatch.setattr(filesystem, "_FIRST_WAIT_S", 0.01)


@pytest.fixture
def s3(s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    return s3_bucket.use(monkeypatch)


@pytest.fixture
def gcs(gcs_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    return gcs_bucket.use(monkeypatch)


@pytest.fixture
def azure(azure_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    return azure_bucket.use(monkeypatch)


def ids(table: Table) -> list[int]:
    return sorted(number for batch in Loader(table, 16, shuffle=True) for number in batch["id"].tolist())


@pytest.mark.parametrize("kind", ["s3", "azure"])
def test_a_delta_table(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for start in (0, 50):
        write_deltalake(tmp_path / "delta", image_rows(start, start + 50), mode="append")
    DeltaTable(tmp_path / "delta").delete("id < 20")
    uri = f"{request.getfixturevalue(kind)}/delta"
    upload(uri, tmp_path / "delta")
    table = Table(uri)
    assert (table.kind, table.version) == ("delta", 2)
    assert ids(table) == list(range(20, 100))
    assert ids(Table(uri, version=1)) == list(range(100))
    assert ids(pickle.loads(pickle.dumps(table))) == list(range(20, 100))


@pytest.mark.parametrize("kind", ["s3", "azure"])
def test_parquet_images_and_globs(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    uri = request.getfixturevalue(kind)
    for part in range(3):
        pq.write_table(image_rows(part * 10, part * 10 + 10), tmp_path / f"part {part}.parquet")
    upload(f"{uri}/plain", tmp_path)
    assert ids(Table(f"{uri}/plain")) == list(range(30))
    assert ids(Table(f"{uri}/plain/part%20[01].parquet")) == list(range(20))
    assert ids(Table(f"{uri}/plain/part%20?.parquet")) == list(range(30))
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "1.png").write_bytes(png(1))
    upload(f"{uri}/photos", tmp_path / "photos")
    assert Table(f"{uri}/photos").head().to_pylist()[0]["label_name"] == "cat"


@pytest.mark.parametrize("address", ["az://lake", "abfss://lake", "abfs://lake@devstoreaccount1.blob.core.windows.net"])
def test_addresses_of_azure(azure: str, tmp_path: Path, address: str) -> None:
    pq.write_table(image_rows(0, 30), tmp_path / "a.parquet", row_group_size=10)
    upload(f"{azure}/addresses", tmp_path)
    assert ids(Table(f"{address}/addresses")) == list(range(30))


def test_addresses_of_azure_that_are_not_complete(azure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"expected abfss://CONTAINER@ACCOUNT\.dfs\.core\.windows\.net/PATH"):
        Table("abfss://lake@devstoreaccount1/flowers")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(DataError, match="the storage account is missing"):
        Table("abfss://lake/flowers")


def test_a_wrong_key_of_azure_is_refused_at_once(azure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c29tZXRoaW5nIGVsc2U=")
    with pytest.raises(DataError, match=r"can't be reached .*403.*AZURE_STORAGE_ACCOUNT_KEY") as raised:
        Table(f"{azure}/flowers")
    assert "c29tZXRoaW5n" not in str(raised.value)


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


@pytest.mark.parametrize("failure", ["busy", "cut"])
def test_azure_is_asked_again_when_it_fails(
    azure: str, azure_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    pq.write_table(image_rows(0, 30), tmp_path / "a.parquet", row_group_size=10)
    upload(f"{azure}/failing", tmp_path)
    with Proxy(f"http://127.0.0.1:{azure_bucket.port}") as proxy:
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{proxy.url}/devstoreaccount1")
        proxy.fail = lambda number: failure if number < 3 else None
        assert ids(Table(f"{azure}/failing")) == list(range(30))


def test_azure_without_an_answer_is_an_error_that_names_the_variables(
    azure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{free_port()}/devstoreaccount1")
    with pytest.raises(DataError, match=r"can't be reached .*AZURE_STORAGE_ACCOUNT_KEY"):
        Table(f"{azure}/anything")


def test_a_table_of_azure_takes_no_credentials_along(azure: str, tmp_path: Path) -> None:
    pq.write_table(image_rows(0, 30), tmp_path / "a.parquet", row_group_size=10)
    upload(f"{azure}/pickled", tmp_path)
    content = pickle.dumps(Table(f"{azure}/pickled"))
    assert os.environ["AZURE_STORAGE_ACCOUNT_KEY"].encode() not in content
    assert ids(pickle.loads(content)) == list(range(30))


@pytest.mark.parametrize("kind", ["s3", "gcs", "azure"])
def test_packed_documents_are_the_same_sequences_as_those_of_local_files(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for part in range(3):
        documents = [[number] * (1 + number % 11) for number in range(40 * part, 40 * part + 40)]
        pq.write_table(pa.table({"tokens": documents}), tmp_path / f"{part}.parquet", row_group_size=16)
    uri = f"{request.getfixturevalue(kind)}/documents"
    upload(uri, tmp_path)
    far, near = (
        [batch["tokens"].tolist() for batch in Loader(Table(source).pack(16), 4, shuffle=True)]
        for source in (uri, tmp_path)
    )
    assert far == near


ROWS, GROUPS = 6000, 6


@pytest.fixture
def through(s3: str, s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before a server with s3://lake/large: 6,000 rows in 6 row groups of 2 MB each."""
    random = np.random.default_rng(0)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(random.normal(size=ROWS * 256)), 256)
    (tmp_path / "large").mkdir()
    pq.write_table(
        pa.table({"id": range(ROWS), "vector": vectors}),
        tmp_path / "large" / "a.parquet",
        row_group_size=ROWS // GROUPS,
    )
    upload(f"{s3}/large", tmp_path / "large")
    with Proxy(s3_bucket.settings["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


LARGE = "s3://lake/large"


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True], ids=["straight", "cached"])
@pytest.mark.parametrize("failure", ["busy", "cut"])
def test_a_server_that_fails_in_the_middle_is_asked_again(
    through: Proxy, tmp_path: Path, failure: str, cached: bool
) -> None:
    # All five failures may meet one request, which is made six times.
    through.fail = lambda number: failure if 1 <= number <= 5 else None
    assert ids(Table(LARGE, cache=tmp_path / "cache" if cached else None)) == list(range(ROWS))


@pytest.mark.slow
def test_a_server_that_never_recovers_is_an_error_that_names_the_file(through: Proxy) -> None:
    table = Table(LARGE)
    assert table.num_rows == ROWS
    through.fail = lambda number: "busy"
    with pytest.raises(DataError, match=r"lake/large/a.parquet, row group \d: can't be read"):
        ids(table)


def test_what_was_read_once_is_read_from_the_disk(through: Proxy, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    table = Table(LARGE, cache=cache)
    assert ids(table) == list(range(ROWS))
    first, size = through.read_bytes, (tmp_path / "large" / "a.parquet").stat().st_size
    assert first <= 1.05 * size
    assert size_of(cache) == size + 4 * len(list(cache.glob("*/0000*")))  # a checksum at the end of each block
    assert ids(table) == ids(Table(LARGE, cache=str(cache))) == list(range(ROWS))
    assert through.read_bytes == first
    assert ids(pickle.loads(pickle.dumps(table))) == list(range(ROWS))
    assert through.read_bytes == first


def test_an_open_file_is_read_by_one_request_for_each_row_group(through: Proxy) -> None:
    table = Table(LARGE)
    assert table.num_rows == ROWS
    before = len(through.reads)
    assert [len(rows) for rows in table.read_groups([4, 0])] == [ROWS // GROUPS] * 2
    assert len(through.reads) == before + 2


def test_a_forked_process_does_not_use_the_connections_of_its_parent(through: Proxy) -> None:
    table = Table(LARGE)

    def read(group: int) -> None:
        assert table.read_group(group)["id"].to_pylist() == list(range(group * 1000, group * 1000 + 1000))

    read(0)
    before = len(through.connections)
    read(1)
    # The parent uses its connections again.
    assert not set(through.connections[:before]).isdisjoint(through.connections[before:])
    of_parent, before = set(through.connections), len(through.connections)
    child = multiprocessing.get_context("fork").Process(target=read, args=(2,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert len(through.connections) > before
    assert of_parent.isdisjoint(through.connections[before:])
    read(3)


def test_a_file_that_was_replaced_is_an_error_without_a_cache(
    through: Proxy, s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(LARGE)
    table.read_group(0)
    s3_bucket.use(monkeypatch)
    upload(LARGE, replaced(tmp_path))
    for _ in range(2):
        with pytest.raises(DataError, match="is gone: the table was vacuumed or rewritten"):
            table.read_group(5)


def test_only_what_is_used_is_fetched(through: Proxy, tmp_path: Path) -> None:
    Table(LARGE, cache=tmp_path / "cache").read_group(2)
    assert through.read_bytes < 6 * 2**20


def test_the_cache_stays_below_its_limit_and_keeps_what_was_used_last(through: Proxy, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    table = Table(LARGE, cache=FileCache(cache, max_bytes=6 * 2**20))
    for group in (0, 1, 2, 3, 4, 5, 4):
        table.read_group(group)
    assert size_of(cache) <= 6 * 2**20
    before = through.read_bytes
    table.read_group(4)
    assert through.read_bytes == before
    table.read_group(0)
    assert through.read_bytes > before


DAMAGE = {
    "emptied": lambda data: b"",
    "cut": lambda data: data[:-100],
    "flipped": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "zeroed": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_block_is_fetched_again(tmp_path: Path, damage: str) -> None:
    content = np.random.default_rng(0).bytes(3 * BLOCK_BYTES + 10_000)
    fetched: list[int] = []

    def fetch(offset: int, length: int) -> bytes:
        fetched.append(offset)
        return content[offset : offset + length]

    def read() -> bytes:
        return FileCache(tmp_path).open().read("a file", len(content), 0, len(content), fetch)

    assert read() == read() == content
    assert fetched == [0]
    for number in (1, 3):
        (block,) = tmp_path.glob(f"*/{number:06}")
        block.write_bytes(DAMAGE[damage](block.read_bytes()))
    assert read() == content
    assert set(fetched) == {0, BLOCK_BYTES}  # one request, from the first damaged block to the last
    assert read() == content
    assert len(fetched) == 2


def test_a_block_in_the_place_of_another_is_fetched_again(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(2 * BLOCK_BYTES)

    def read() -> bytes:
        fetch = lambda offset, length: content[offset : offset + length]  # noqa: E731
        return FileCache(tmp_path).open().read("a file", len(content), 0, len(content), fetch)

    read()
    (first,), (second,) = tmp_path.glob("*/000000"), tmp_path.glob("*/000001")
    second.write_bytes(first.read_bytes())
    assert read() == content


def test_a_file_that_was_replaced_is_not_mixed_with_what_was_cached(
    through: Proxy, s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    table = Table(LARGE, cache=cache)
    table.read_group(0)
    s3_bucket.use(monkeypatch)
    upload(LARGE, replaced(tmp_path))
    with pytest.raises(DataError, match="is gone: the table was vacuumed or rewritten"):
        table.read_group(5)
    assert ids(Table(LARGE, cache=cache)) == list(range(7, ROWS + 7))


def replaced(tmp_path: Path) -> Path:
    table = pq.read_table(tmp_path / "large" / "a.parquet")
    table = table.set_column(0, "id", pa.array(range(7, ROWS + 7)))
    pq.write_table(table, tmp_path / "large" / "a.parquet", row_group_size=ROWS // GROUPS)
    return tmp_path / "large"


READ = """
import sys
from footplate.data import Loader, Table
rows = [row for batch in Loader(Table(sys.argv[1], cache=sys.argv[2]), 64, shuffle=True) for row in batch["id"].tolist()]
assert sorted(rows) == list(range(int(sys.argv[3]))), len(rows)
"""


@pytest.mark.slow
def test_processes_share_the_cache_and_fetch_everything_once(through: Proxy, tmp_path: Path) -> None:
    command = [sys.executable, "-c", READ, LARGE, str(tmp_path / "cache"), str(ROWS)]
    ranks = [subprocess.Popen(command, env=os.environ.copy()) for _ in range(3)]
    assert [rank.wait(200) for rank in ranks] == [0, 0, 0]
    assert through.read_bytes <= 1.05 * (tmp_path / "large" / "a.parquet").stat().st_size


@pytest.mark.slow
def test_a_process_killed_while_it_fetches_leaves_a_cache_that_works(through: Proxy, tmp_path: Path) -> None:
    command = [sys.executable, "-c", READ, LARGE, str(tmp_path / "cache"), str(ROWS)]
    victim = subprocess.Popen(command, env=os.environ.copy())
    while len(through.reads) < 3:
        assert victim.poll() is None
    victim.kill()
    victim.wait(10)
    assert ids(Table(LARGE, cache=tmp_path / "cache")) == list(range(ROWS))


def test_a_table_on_google_cloud_storage_is_cached_too(gcs: str, tmp_path: Path) -> None:
    pq.write_table(image_rows(0, 30), tmp_path / "a.parquet", row_group_size=10)
    upload(f"{gcs}/cached", tmp_path)
    table = Table(f"{gcs}/cached/a.parquet", cache=tmp_path / "cache")
    assert ids(table) == list(range(30))
    assert (
        size_of(tmp_path / "cache") == (tmp_path / "a.parquet").stat().st_size + 4
    )  # a checksum at the end of its block


def test_a_cache_that_can_not_be_written_is_an_error(s3: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cache=.*can't be used"):
        Table(f"{s3}/anything", cache=tmp_path / "file" / "cache")
