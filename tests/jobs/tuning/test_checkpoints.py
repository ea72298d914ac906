"""Copies of checkpoints that trials begin from."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from footplate.core.errors import ConfigError
from footplate.jobs.tuning.checkpoints import keep_checkpoint


def checkpoint(path: Path, content: str = "weights") -> Path:
    path.mkdir(parents=True)
    (path / "state.safetensors").write_text(content)
    (path / "meta.json").write_text("{}")
    return path


def content_of(path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in path.iterdir()}


@pytest.mark.parametrize("links", [True, False])
def test_a_kept_checkpoint_stays_when_its_training_deletes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
):
    def on_another_disk(*_: Any) -> None:
        raise OSError(errno.EXDEV, "another disk")

    if not links:
        monkeypatch.setattr(os, "link", on_another_disk)
    source = checkpoint(tmp_path / "base" / "last.ckpt")
    keep_checkpoint(source, tmp_path / "runs" / "start.ckpt")
    shutil.rmtree(source)
    assert content_of(tmp_path / "runs" / "start.ckpt") == {"state.safetensors": "weights", "meta.json": "{}"}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["start.ckpt"]


def test_a_copy_of_an_earlier_tuning_and_what_a_killed_process_left_are_replaced(tmp_path: Path):
    target = checkpoint(tmp_path / "start.ckpt", "old")
    checkpoint(tmp_path / ".new-start.ckpt", "half")
    keep_checkpoint(checkpoint(tmp_path / "base.ckpt"), target)
    assert content_of(target)["state.safetensors"] == "weights"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.ckpt", "start.ckpt"]


def test_a_checkpoint_that_was_deleted_is_refused_and_the_copy_of_another_stays(tmp_path: Path):
    target = checkpoint(tmp_path / "start.ckpt", "old")
    with pytest.raises(ConfigError, match=r"base\.ckpt can't be kept as .*start\.ckpt: .*No such file"):
        keep_checkpoint(tmp_path / "base.ckpt", target)
    assert content_of(target)["state.safetensors"] == "old"
