"""Tables in repositories of the Hugging Face Hub, from a server on loopback that answers as the Hub does."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from footplate.core.errors import DataError, MissingExtra
from footplate.data import Loader, Table
from footplate.data.remote import filesystem

from .conftest import image_rows, png
from .hub_server import Hub

DATASET = "hf://datasets/someone/flowers"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with the dataset someone/flowers: 40 rows in `data/`, and what else such a repository has."""
    monkeypatch.setattr(filesystem, "_FIRST_WAIT_S", 0.01)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "flowers"
    (folder / "data").mkdir(parents=True)
    for part in range(4):
        rows = image_rows(part * 10, part * 10 + 10)
        pq.write_table(rows, folder / "data" / f"train-{part:05}-of-00004.parquet", row_group_size=5)
    pq.write_table(image_rows(100, 110), folder / "data" / "test-00000-of-00001.parquet")
    (folder / "README.md").write_text("# Flowers\n")
    (folder / ".gitattributes").write_text("*.parquet filter=lfs\n")
    with Hub() as server:
        server.push("datasets/someone/flowers", folder)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def ids(table: Table) -> list[int]:
    return sorted(number for batch in Loader(table, 8, shuffle=True) for number in batch["id"].tolist())


def replaced(tmp_path: Path) -> Path:
    """The dataset with other rows."""
    for path in (tmp_path / "flowers" / "data").iterdir():
        path.unlink()
    pq.write_table(image_rows(500, 510), tmp_path / "flowers" / "data" / "train-00000-of-00001.parquet")
    return tmp_path / "flowers"


def test_a_dataset_is_read_by_file_pattern_and_directory(hub: Hub) -> None:
    assert ids(Table(f"{DATASET}/data/test-00000-of-00001.parquet")) == list(range(100, 110))
    assert ids(Table(f"{DATASET}/data/train-*.parquet")) == list(range(40))
    assert ids(Table(f"{DATASET}/data/train-0000?-of-00004.parquet")) == list(range(40))
    # Other files of the repository are passed over.
    assert ids(Table(DATASET)) == [*range(40), *range(100, 110)]


def test_images_in_folders_are_a_table(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "photos" / "train" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "train" / "cat" / "1.png").write_bytes(png(1))
    hub.push("datasets/someone/photos", tmp_path / "photos")
    assert Table("hf://datasets/someone/photos/train").head().to_pylist()[0]["label_name"] == "cat"


@pytest.mark.parametrize("branch", ["refs/convert/parquet", "small"])
def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, tmp_path: Path, branch: str) -> None:
    commit = hub.push("datasets/someone/flowers", replaced(tmp_path), branch)
    for revision in (branch, commit):
        assert ids(Table(f"{DATASET}@{revision}/data/*.parquet")) == list(range(500, 510))
    assert len(ids(Table(f"{DATASET}@main/data"))) == 50


def test_a_branch_is_pinned_when_the_table_is_opened(hub: Hub, tmp_path: Path) -> None:
    table = Table(f"{DATASET}/data/train-*.parquet")
    assert table.num_rows == 40
    hub.push("datasets/someone/flowers", replaced(tmp_path))
    assert ids(table) == ids(pickle.loads(pickle.dumps(table))) == list(range(40))
    later = Table(f"{DATASET}/data/train-*.parquet")
    assert ids(later) == list(range(500, 510))
    assert later.digest != table.digest


def test_a_forked_process_reads_the_same_commit(hub: Hub, tmp_path: Path) -> None:
    table = Table(f"{DATASET}/data/train-*.parquet")
    table.read_group(0)
    hub.push("datasets/someone/flowers", replaced(tmp_path))

    def read() -> None:
        assert table.read_group(3)["id"].to_pylist() == list(range(15, 20))

    child = multiprocessing.get_context("fork").Process(target=read)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_a_cache_keeps_what_was_read(hub: Hub, tmp_path: Path) -> None:
    address = f"{DATASET}/data/train-*.parquet"
    assert ids(Table(address, cache=tmp_path / "cache")) == list(range(40))
    before = len(hub.requests)
    assert ids(Table(address, cache=tmp_path / "cache")) == list(range(40))
    assert not [request for request in hub.requests[before:] if "/resolve/" in request]


def test_a_delta_table_on_the_hub_is_refused(hub: Hub, tmp_path: Path) -> None:
    write_deltalake(tmp_path / "delta", image_rows(0, 5))
    hub.push("datasets/someone/delta", tmp_path / "delta")
    with pytest.raises(DataError, match="Delta tables at hf:// can't be read"):
        Table("hf://datasets/someone/delta")


def test_packed_documents_are_those_of_local_files(hub: Hub, tmp_path: Path) -> None:
    documents = [[number] * (1 + number % 11) for number in range(40)]
    (tmp_path / "text").mkdir()
    pq.write_table(pa.table({"tokens": documents}), tmp_path / "text" / "a.parquet", row_group_size=16)
    hub.push("datasets/someone/text", tmp_path / "text")
    far, near = (
        [batch["tokens"].tolist() for batch in Loader(Table(source).pack(16), 4, shuffle=True)]
        for source in ("hf://datasets/someone/text", tmp_path / "text")
    )
    assert far == near


def test_a_hub_that_is_busy_is_asked_again(hub: Hub) -> None:
    table = Table(f"{DATASET}/data/train-*.parquet")
    assert table.num_rows == 40
    hub.fail = 5
    assert ids(table) == list(range(40))


def test_the_hub_redirects_once_for_each_file(hub: Hub) -> None:
    table = Table(f"{DATASET}/data/train-*.parquet")
    assert ids(table) == list(range(40))
    assert len([request for request in hub.requests if "/resolve/" in request]) == 4
    assert len([request for request in hub.requests if "/cdn/" in request]) > 8


def test_an_address_in_its_storage_that_has_expired_is_asked_for_again(hub: Hub) -> None:
    table = Table(f"{DATASET}/data/train-*.parquet")
    assert ids(table) == list(range(40))
    hub.signature = "2"
    assert ids(table) == list(range(40))


def test_a_hub_that_says_when_to_come_back_is_waited_for(hub: Hub) -> None:
    hub.busy = 1
    assert ids(Table(f"{DATASET}/data/test-*.parquet")) == list(range(100, 110))


def test_a_private_repository_needs_the_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(DataError, match=r"flowers/data: can't be reached \(401.*HF_TOKEN"):
        Table(f"{DATASET}/data")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    table = Table(f"{DATASET}/data")
    assert len(ids(table)) == 50
    assert b"hf_secret" not in pickle.dumps(table)


def test_a_gated_repository_says_that_its_owner_must_grant_access(hub: Hub) -> None:
    hub.gated = True
    with pytest.raises(DataError, match="its owner must grant access on its page"):
        Table(DATASET)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("hf://datasets/someone/nothing/data", "can't be reached .*401"),
        (f"{DATASET}@nowhere/data", "can't be reached .*Revision Not Found"),
        (f"{DATASET}/nothing", "there is nothing at this path"),
        (f"{DATASET}/data/valid-*.parquet", "no file matches this pattern"),
        (f"{DATASET}/README.md", "neither a Delta table"),
        ("hf://flowers", "expected hf://datasets/OWNER/NAME/PATH"),
        ("hf://buckets/someone/flowers", "expected hf://datasets/OWNER/NAME/PATH"),
    ],
)
def test_what_is_missing_is_named(hub: Hub, address: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        Table(address)


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match=r'Reading hf:// needs huggingface_hub.*pip install "footplate\[hf\]"'):
        Table(DATASET)
