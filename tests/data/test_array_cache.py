"""Arrays in a cache are complete, also if several threads or processes write them at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from footplate.core.errors import DataError
from footplate.data.array_cache import load_array, save_array

ARRAY = np.arange(10)


def test_another_thread_may_write_the_same_array_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = np.save

    def write_beside_another(file: Any, array: np.ndarray) -> None:
        write(file, array)
        monkeypatch.undo()
        save_array(tmp_path / "a.npy", array)

    monkeypatch.setattr(np, "save", write_beside_another)
    save_array(tmp_path / "a.npy", ARRAY)
    array = load_array(tmp_path / "a.npy")
    assert array is not None
    assert array.tolist() == ARRAY.tolist()
    assert [file.name for file in tmp_path.iterdir()] == ["a.npy"]


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_a_part(file: Any, array: np.ndarray) -> None:
        Path(file).write_bytes(b"begun")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", write_a_part)
    with pytest.raises(DataError, match=r"cache=.*can't be used \(No space left on device\)"):
        save_array(tmp_path / "a.npy", ARRAY)
    assert list(tmp_path.iterdir()) == []
