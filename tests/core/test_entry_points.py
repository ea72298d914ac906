"""Entry points of packages that are installed, changed and removed while the process runs."""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

from footplate.core.entry_points import entry_points

GROUP = "footplate.of_a_test"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(folder: Path, version: str, entries: str) -> Path:
    about = folder / f"offers-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: offers\nVersion: {version}\n")
    (about / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")
    return about


def names() -> list[str]:
    return [entry.name for entry in entry_points(GROUP)]


def test_packages_are_found_as_soon_as_they_are_installed_updated_and_removed(folder: Path):
    assert names() == []
    first = install(folder, "1", "one = offers:one")
    assert names() == ["one"]
    shutil.rmtree(first)
    second = install(folder, "2", "one = offers:one\ntwo = offers:two")
    one, two = entry_points(GROUP)
    assert (one.name, two.value, two.dist.version) == ("one", "offers:two", "2")
    shutil.rmtree(second)
    assert names() == []


def test_a_package_belongs_to_the_folders_of_the_moment(folder: Path, monkeypatch: pytest.MonkeyPatch):
    install(folder, "1", "one = offers:one")
    assert names() == ["one"]
    with monkeypatch.context() as patch:
        patch.setattr("sys.path", [path for path in sys.path if path != str(folder)])
        assert names() == []
    assert names() == ["one"]


def test_the_first_folder_with_a_package_counts(folder: Path, tmp_path_factory, monkeypatch: pytest.MonkeyPatch):
    install(folder, "1", "one = offers:one")
    for version, entries in (("2", "two = offers:two"), ("3", "")):
        first = tmp_path_factory.mktemp("first")
        install(first, version, entries)
        monkeypatch.syspath_prepend(first)
        expected = metadata.entry_points(group=GROUP)
        assert names() == sorted(expected.names)
    assert names() == []


def test_the_packages_of_this_environment_are_those_that_python_finds():
    for group in ("console_scripts", "pytest11"):
        ours, pythons = entry_points(group), metadata.entry_points(group=group)
        assert [(entry.name, entry.value) for entry in ours] == [(entry.name, entry.value) for entry in pythons]
        assert ours


def test_a_folder_is_read_again_when_it_has_changed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    reads: list[str] = []
    read = metadata.distributions
    install(folder, "1", "one = offers:one")
    os.utime(folder, (1000, 1000))
    assert names() == ["one"]
    monkeypatch.setattr(metadata, "distributions", lambda path: reads.extend(path) or read(path=path))
    assert [names(), names()] == [["one"], ["one"]]
    assert reads == []
    os.utime(folder, (1001, 1001))
    assert [names(), names()] == [["one"], ["one"]]
    assert reads == [str(folder)]
    # Another change may have this time, too.
    os.utime(folder)
    assert [names(), names()] == [["one"], ["one"]]
    assert reads == [str(folder)] * 3
