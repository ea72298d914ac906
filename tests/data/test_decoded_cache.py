"""The decoded cache gives the same pixels as decoding, and only for rows and files that it really holds."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import torch
from deltalake import DeltaTable

from footplate.core.errors import ConfigError, DataError
from footplate.data import DecodedCache, Loader, Table
from footplate.distributed.world import World

from .test_loader import damaged


def epoch(loader: Loader) -> dict[int, torch.Tensor]:
    return {number: image for b in loader for number, image in zip(b["id"].tolist(), b["image"], strict=True)}


def same(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[number], other[number]) for number in one)


def test_cached_epochs_hand_out_the_same_pixels_in_the_same_order(delta: str, tmp_path: Path) -> None:
    plain = Loader(Table(delta), 32, shuffle=True, image_size=6)
    cached = Loader(Table(delta), 32, shuffle=True, image_size=6, cache=tmp_path / "cache")
    for _ in range(3):
        expected, from_cache = epoch(plain), epoch(cached)
        assert list(from_cache) == list(expected)
        assert same(from_cache, expected)


def test_a_complete_cache_is_used_without_reading_the_images(delta: str, tmp_path: Path) -> None:
    table = Table(delta)
    first = epoch(Loader(table, 32, image_size=6, cache=tmp_path / "cache"))
    loader = Loader(table.select(["image"]), 32, image_size=6, cache=tmp_path / "cache")
    list(loader)
    for file in table.files:
        Path(file).unlink()
    assert torch.equal(torch.cat([batch["image"] for batch in loader]), torch.stack(list(first.values())))
    assert not [thread for thread in threading.enumerate() if thread.name == "footplate-seal"]
    assert [path.name for path in (tmp_path / "cache").iterdir() if "." not in path.name]


def test_ranks_fill_one_cache_together(delta: str, tmp_path: Path) -> None:
    ranks = [
        Loader(Table(delta), 25, shuffle=True, image_size=6, world=World(rank, 2), cache=tmp_path / "cache")
        for rank in range(2)
    ]
    plain = Loader(Table(delta), 50, shuffle=True, image_size=6)
    for _ in range(2):
        assert same(epoch(ranks[0]) | epoch(ranks[1]), epoch(plain))
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def test_a_bounded_cache_decodes_the_rest(delta: str, tmp_path: Path) -> None:
    cache = DecodedCache(tmp_path / "cache", max_bytes=50 * 36)
    loader = Loader(Table(delta), 32, image_size=6, cache=cache)
    plain = epoch(Loader(Table(delta), 32, image_size=6))
    for _ in range(2):
        assert same(epoch(loader), plain)
    assert [path.stat().st_size for path in (tmp_path / "cache").rglob("pixels")] == [50 * 36]


def test_what_was_cached_before_a_restart_but_never_completed_is_dropped(
    delta: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(Table(delta), 32, image_size=6, cache=tmp_path / "cache")
    next(iter(loader))
    (before,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    monkeypatch.setattr("footplate.data.pipeline.decoded_cache._boot", lambda: "another-boot")
    epoch(Loader(Table(delta), 32, image_size=6, cache=tmp_path / "cache"))
    assert not before.exists()


def test_other_rows_sizes_and_channels_have_caches_of_their_own(delta: str, tmp_path: Path) -> None:
    table = Table(delta)
    for options in ({"image_size": 6}, {"image_size": 4}, {"image_size": 6, "image_mode": "RGB"}):
        epoch(Loader(table, 32, cache=tmp_path / "cache", **options))  # type: ignore[arg-type]
    DeltaTable(delta).delete("id < 10")
    assert 3 not in epoch(Loader(Table(delta), 32, image_size=6, cache=tmp_path / "cache"))
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 4


def test_undecodable_images_stay_undecodable(tmp_path: Path) -> None:
    table = Table(damaged(tmp_path / "t", 23, b"\xff\xd8\xff\xe0 no picture"))
    loader = Loader(table, 8, on_error="skip", image_size=6, cache=tmp_path / "cache")
    for _ in range(2):
        assert list(epoch(loader)) == [number for number in range(40) if number != 23]
    assert loader.skipped == 2
    loader = Loader(table, 8, on_error="skip", image_size=6, cache=tmp_path / "cache", transform=lambda row: row)
    assert list(epoch(loader)) == [number for number in range(40) if number != 23]


def test_a_transform_gets_copies_of_cached_images(delta: str, tmp_path: Path) -> None:
    def spoil(row: dict) -> dict:
        row["image"].fill_(0)
        return row

    table = Table(delta)
    for _ in range(2):
        list(Loader(table, 32, image_size=6, cache=tmp_path / "cache", transform=spoil))
    plain = epoch(Loader(table, 32, image_size=6))
    assert same(epoch(Loader(table, 32, image_size=6, cache=tmp_path / "cache")), plain)


def test_a_uri_is_no_cache(delta: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cache='s3://lake/cache': expected a directory on a local disk"):
        Table(delta, cache="s3://lake/cache")
    with pytest.raises(ConfigError, match="cache='s3://lake/cache': expected a directory on a local disk"):
        Loader(Table(delta), 4, image_size=(8, 8), cache="s3://lake/cache")
    assert not Path("s3:").exists()


def test_a_cache_that_can_not_be_written_says_what_to_do(
    delta: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="writable local directory"):
        next(iter(Loader(Table(delta), 8, image_size=6, cache=tmp_path / "file")))
    with pytest.raises(ConfigError, match="image_size="):
        Loader(Table(delta), 8, cache=tmp_path / "cache")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(DataError, match="No space left on device"):
        next(iter(Loader(Table(delta), 8, image_size=6, cache=tmp_path / "cache")))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
