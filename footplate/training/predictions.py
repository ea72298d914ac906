"""Predictions as a table: the returns of `predict_step`, written batch by batch as Parquet.

The directory appears complete or not at all. Files are written beside it, and renamed after the last batch. With several
ranks, each rank writes its own files, of its own share of the rows. Rank 0 makes the directory and renames it.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from footplate.core.errors import ConfigError, DataError
from footplate.distributed.consistency import blind
from footplate.distributed.group import ALONE, Group

if TYPE_CHECKING:
    from footplate.data.table import Table

ROWS_PER_FILE = 1_000_000


class PredictionWriter:
    """Writes batches to `path/part-00000.parquet`, …, and with several ranks to `part-001-00000.parquet`, ….

    Args:
        path: the directory. All ranks see it.
        group: the ranks. All of them make a writer, enter it and leave it.
        share: this rank's share of the rows; its number is in the names of files. None if another rank writes that share.

    Raises:
        ConfigError: `path` holds something that is not a table of predictions.
    """

    def __init__(self, path: Path, group: Group = ALONE, share: int | None = 0) -> None:
        group.ask_first(lambda: self._check(path))
        self.path = path
        self._group = group
        self._share = share
        self._prefix = f"part-{share or 0:03}-" if group.is_distributed else "part-"
        self._temporary = path.with_name(f".tmp-{path.name}-{group.from_first(uuid.uuid4().hex)}")
        self._writer: pq.ParquetWriter | None = None
        self._files = 0
        self._rows = 0

    @staticmethod
    def _check(path: Path) -> None:
        if path.exists() and (not path.is_dir() or any(not f.name.startswith("part-") for f in path.iterdir())):
            raise ConfigError(f"output={str(path)!r} exists and holds something else. Choose another directory.")

    def __enter__(self) -> Self:
        self._group.ask_first(lambda: self._temporary.mkdir(parents=True))
        without = blind(self._group, self._temporary)
        if without:
            self._group.ask_first(lambda: shutil.rmtree(self._temporary, ignore_errors=True))
            raise ConfigError(
                f"output={str(self.path)!r}: {without} can't see this directory. All ranks write into it. Choose one on a "
                "disk that all machines share."
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()
        if kind is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            return
        self._group.barrier()
        self._group.ask_first(self._finish)

    def _finish(self) -> None:
        if self.path.exists():
            shutil.rmtree(self.path)
        self._temporary.rename(self.path)

    def write(self, prediction: Any) -> None:
        """Append a batch: a tensor (column "prediction"), or a dict of tensors and lists of one length."""
        if self._share is None:
            return
        batch = to_record_batch(prediction)
        if self._writer is None or self._rows >= ROWS_PER_FILE:
            if self._writer is not None:
                self._writer.close()
            self._writer = pq.ParquetWriter(self._temporary / f"{self._prefix}{self._files:05}.parquet", batch.schema)
            self._files, self._rows = self._files + 1, 0
        if batch.schema != self._writer.schema:
            raise DataError(
                f"predict_step() changed its columns: {_described(batch.schema)}; before: "
                f"{_described(self._writer.schema)}."
            )
        self._writer.write_batch(batch)
        self._rows += batch.num_rows

    def table(self) -> Table:
        """Return the table that was written."""
        from footplate.data.table import Table

        return Table(str(self.path))


def to_record_batch(prediction: Any) -> pa.RecordBatch:
    """Return a batch of predictions as Arrow columns. A tensor of several dimensions becomes lists.

    Raises:
        DataError: neither a tensor nor a dict, or columns of different lengths.
    """
    columns = prediction if isinstance(prediction, dict) else {"prediction": prediction}
    arrays: dict[str, pa.Array] = {}
    for name, value in columns.items():
        if isinstance(value, Tensor):
            array = value.detach().to("cpu")
            array = (array.float() if array.dtype.itemsize == 2 and array.is_floating_point() else array).numpy()
            arrays[str(name)] = _nested(array)
        elif isinstance(value, np.ndarray):
            arrays[str(name)] = _nested(value)
        elif isinstance(value, (list, tuple)):
            arrays[str(name)] = pa.array(value)
        else:
            raise DataError(
                f'predict_step() returned {type(value).__name__} for "{name}": to write a table, return a tensor, or a '
                "dict of tensors or lists whose first dimension is the batch."
            )
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"predict_step() returned columns of different lengths: {lengths}.")
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _nested(array: np.ndarray) -> pa.Array:
    if array.ndim <= 1:
        return pa.array(np.atleast_1d(array))
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, int(size))
    return flat
