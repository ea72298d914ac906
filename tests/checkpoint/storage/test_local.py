"""Checkpoints on a disk, with a kill before every single file operation."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from footplate import checkpoint
from footplate.checkpoint.storage.local import LocalStore

TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.truncate"}


def killed_before(number: int, work: Callable[[], None]) -> bool:
    """Run some work in a process that dies before its `number`-th file operation. Return True if it died."""
    process = os.fork()
    if process == 0:
        left = number

        def count(event: str, arguments: tuple) -> None:
            nonlocal left
            if event in TOUCHES:
                left -= 1
                if left < 0:
                    os._exit(9)

        sys.addaudithook(count)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code in (0, 9)
    return code == 9


def save(directory: Path, number: int, same: bool) -> None:
    """Save like a callback that keeps the latest checkpoint, under a new name or always the same one."""
    path = directory / ("a.ckpt" if same else f"{number}.ckpt")
    checkpoint.clean_up(directory)
    older = [earlier for earlier in checkpoint.find(directory) if earlier != path]
    checkpoint.save({"state_dict": {"w": torch.full((10,), number)}, "number": number}, path, {"number": number})
    checkpoint.point(directory / checkpoint.LAST, path)
    for earlier in older:
        checkpoint.delete(earlier)


def check(directory: Path, done: int, begun: int) -> None:
    """Check the directory after `done` finished saves, when save `begun` has possibly begun."""
    for swept in (False, True):
        if swept:
            checkpoint.clean_up(directory)
        assert all(map(checkpoint.is_complete, checkpoint.find(directory)))
        newest = checkpoint.newest([directory])
        if newest is None:
            assert done == 0, "the only complete checkpoint is gone"
            continue
        state = checkpoint.load(newest)
        assert done <= state["number"] <= begun
        assert state["state_dict"]["w"].eq(state["number"]).all()
        if os.path.lexists(directory / checkpoint.LAST):
            assert done <= checkpoint.load(directory / checkpoint.LAST)["number"] <= begun
    left = [path.name for path in directory.iterdir() if not path.name.endswith(".ckpt") or path.name.startswith(".")]
    assert left == [], "litter"


@pytest.mark.parametrize("same", [False, True])
def test_killed_before_any_touch_of_the_disk_there_is_a_whole_one(same, tmp_path):
    save(tmp_path, 1, same)
    done, touches = 1, 0
    while killed_before(touches, lambda: save(tmp_path, done + 1, same)):
        check(tmp_path, done, done + 1)
        save(tmp_path, done := done + 1, same)
        touches += 1
    assert touches >= 10
    check(tmp_path, done + 1, done + 1)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=6))
def test_killed_again_and_again_there_is_a_whole_one(tmp_path, attempts):
    directory = tmp_path / os.urandom(8).hex()
    directory.mkdir()
    done = 0
    for number, (touches, same) in enumerate(attempts, 1):
        if not killed_before(touches, lambda number=number, same=same: save(directory, number, same)):
            done = number
        check(directory, done, number)


def test_a_link_that_was_copied_into_a_directory_becomes_a_link_again(tmp_path):
    checkpoint.save({"state_dict": {}, "x": 1}, tmp_path / checkpoint.LAST, {})
    checkpoint.save({"state_dict": {}, "x": 2}, tmp_path / "2.ckpt", {})
    checkpoint.point(tmp_path / checkpoint.LAST, tmp_path / "2.ckpt")
    assert (tmp_path / checkpoint.LAST).is_symlink()
    assert checkpoint.load(tmp_path / checkpoint.LAST)["x"] == 2


def test_a_clock_that_was_put_back_does_not_make_an_older_one_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 4e9)
    checkpoint.save({"state_dict": {}}, tmp_path / "first.ckpt", {})
    monkeypatch.undo()
    checkpoint.save({"state_dict": {}}, tmp_path / "second.ckpt", {})
    assert checkpoint.newest([tmp_path]).name == "second.ckpt"


def test_files_and_names_are_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    synced: list[int] = []
    original = os.fsync

    def noting(descriptor: int) -> None:
        original(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noting)
    path = tmp_path / "a.ckpt"
    checkpoint.save({"state_dict": {}}, path, {})
    files = [path / checkpoint.STATE, path / checkpoint.META]
    assert synced == [place.stat().st_ino for place in (*files, path, tmp_path)]

    synced.clear()
    LocalStore().write_file(tmp_path / "b", lambda file: file.write(b"b"))
    assert synced == [place.stat().st_ino for place in (tmp_path / "b", tmp_path)]
