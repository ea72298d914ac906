"""A checkpoint with several writers: it exists when all have written, and not before."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from footplate import checkpoint
from footplate.checkpoint.format.statefile import freeze
from footplate.checkpoint.storage import joint
from footplate.core.errors import CheckpointError

NAMES = ["shard-00000.safetensors", "shard-00001.safetensors"]


def state(number):
    return freeze({"state_dict": {"w": torch.full((8,), number)}})


def complete(path, token, number, haste):
    joint.complete(path, token, NAMES, state(number), {"number": number}, haste)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_it_is_there_once_the_last_part_is_written(order, tmp_path):
    path, haste = tmp_path / "a.ckpt", threading.Event()
    token = joint.begin(path)
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(complete, path, token, 1, haste)
        for place in order:
            assert not path.exists()
            joint.write_part(path, token, NAMES[place], freeze({"w": torch.full((place + 1,), place)}))
        writing.result(60)
    assert sorted(file.name for file in path.iterdir()) == ["meta.json", *NAMES, "state.safetensors"]
    assert checkpoint.is_complete(path)
    files = json.loads((path / "meta.json").read_text())["files"]
    assert {name: file["bytes"] for name, file in files.items()} == {
        name: (path / name).stat().st_size for name in ["state.safetensors", *NAMES]
    }
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_part_that_never_comes_is_not_waited_for_in_haste_and_the_older_checkpoint_stays(tmp_path):
    path, haste = tmp_path / "a.ckpt", threading.Event()
    checkpoint.save({"state_dict": {"w": torch.zeros(8)}}, path, {"number": 0})
    token = joint.begin(path)
    joint.write_part(path, token, NAMES[0], state(1))
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(complete, path, token, 1, haste)
        time.sleep(0.1)
        assert not writing.done()
        haste.set()
        with pytest.raises(
            CheckpointError, match=r"a\.ckpt could not be written: shard-00001\.safetensors was never written"
        ):
            writing.result(joint.LOST_S + 60)
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]
    assert checkpoint.read_meta(path)["number"] == 0


def test_a_part_that_comes_late_is_waited_for_though_in_haste(tmp_path):
    path, haste = tmp_path / "a.ckpt", threading.Event()
    haste.set()
    token = joint.begin(path)
    joint.write_part(path, token, NAMES[1], state(1))
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(complete, path, token, 1, haste)
        time.sleep(0.2)
        joint.write_part(path, token, NAMES[0], state(1))
        writing.result(60)
    assert checkpoint.is_complete(path)


def test_what_a_killed_save_has_left_is_swept_away(tmp_path):
    joint.write_part(tmp_path / "a.ckpt", joint.begin(tmp_path / "a.ckpt"), NAMES[0], state(1))
    assert list(tmp_path.iterdir())
    checkpoint.clean_up(tmp_path)
    assert not list(tmp_path.iterdir())
