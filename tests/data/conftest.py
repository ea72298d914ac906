"""Small real tables on disk."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from object_storage import azure_bucket, gcs_bucket, s3_bucket  # noqa: F401


def picture(number: int, height: int = 8, width: int = 8, channels: int = 1) -> np.ndarray:
    """Make a flat image whose grey value is its number."""
    shape = (height, width) if channels == 1 else (height, width, channels)
    return np.full(shape, number % 256, np.uint8)


def png(number: int, height: int = 8, width: int = 8, channels: int = 1) -> bytes:
    return cv2.imencode(".png", picture(number, height, width, channels))[1].tobytes()


def image_rows(start: int, stop: int) -> pa.Table:
    ids = range(start, stop)
    return pa.table(
        {
            "image": pa.array([png(number) for number in ids], pa.binary()),
            "label": pa.array([number % 10 for number in ids], pa.int32()),
            "id": pa.array(ids, pa.int64()),
            "name": [f"row {number}" for number in ids],
        }
    )


@pytest.fixture
def delta(tmp_path: Path) -> str:
    """200 rows in four files; image i is flat grey i."""
    path = str(tmp_path / "images")
    for start in range(0, 200, 50):
        write_deltalake(path, image_rows(start, start + 50), mode="append")
    return path


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    """103 rows in three files of row groups of ten."""
    folder = tmp_path / "numbers"
    folder.mkdir()
    values = np.arange(103)
    for number, part in enumerate(np.array_split(values, 3)):
        table = pa.table({"id": part, "x": part.astype(np.float32) / 2, "even": part % 2 == 0})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=10)
    return str(folder)
