"""A data module over tables, for the common case: some tables, or one that is split.

data = TableDataModule("lake/flowers", batch_size=64, split={"train": 0.9, "val": 0.1}, image_size=224)
data = TableDataModule(train="lake/train", val="lake/val", batch_size=64)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from footplate.core.errors import ConfigError, did_you_mean
from footplate.data.loader import Loader
from footplate.data.pipeline.decoded_cache import DecodedCache
from footplate.data.pipeline.images import ImageMode
from footplate.data.pipeline.row_transform import Transform
from footplate.data.table import Table
from footplate.training.datamodule import DataModule

_STAGES = ("train", "val", "test", "predict")

TableLike = Table | str | os.PathLike[str]


class TableDataModule(DataModule):
    """Loaders over tables. Training is shuffled and transformed; evaluation sees the rows in the table's order.

    Args:
        table: the one table; it is split by `split`, or all of it trains.
        train: instead of `table`, a table (or its path) of rows to train on.
        val: rows to validate on.
        test: rows to test on.
        predict: rows to predict.
        batch_size: rows of a batch of one rank.
        split: shares of `table`, such as `{"train": 0.9, "val": 0.1}`; see `Table.split`.
        split_key: rows of equal value in this column fall on the same side.
        seed: of the split, the order and the row generators.
        image_size: see `Loader`.
        image_mode: see `Loader`.
        transform: a function of a training row; see `footplate.data.pipeline.row_transform`.
        eval_transform: a function of any other row; what prepares rows, rather than vary them, goes into both.
        drop_last: leave out training rows that don't fill a global batch.
        on_error: see `Loader`.
        num_threads: see `Loader`.
        prefetch: see `Loader`.
        num_workers: see `Loader`; of the loaders that have a transform.
        pin_memory: see `Loader`.
        cache: see `Loader`.

    Raises:
        ConfigError: neither or both of `table` and `train`/`val`/…, or an unknown name in `split`.
        DataError: a table can't be opened.
    """

    def __init__(
        self,
        table: TableLike | None = None,
        *,
        train: TableLike | None = None,
        val: TableLike | None = None,
        test: TableLike | None = None,
        predict: TableLike | None = None,
        batch_size: int = 32,
        split: Mapping[str, float] | None = None,
        split_key: str | None = None,
        seed: int = 0,
        image_size: int | Sequence[int] | None = None,
        image_mode: ImageMode = "auto",
        transform: Transform | None = None,
        eval_transform: Transform | None = None,
        drop_last: bool = False,
        on_error: Literal["raise", "skip"] = "raise",
        num_threads: int | Literal["auto"] = "auto",
        prefetch: int | Literal["auto"] = "auto",
        num_workers: int = 0,
        pin_memory: bool | None = None,
        cache: DecodedCache | str | os.PathLike[str] | None = None,
    ) -> None:
        given = {"train": train, "val": val, "test": test, "predict": predict}
        self.tables: dict[str, Table] = {name: _table(value) for name, value in given.items() if value is not None}
        if (table is None) == (not self.tables):
            raise ConfigError("TableDataModule: give either one table (with split=), or train=, val=, test=, predict=.")
        if table is not None:
            self.tables = _split(_table(table), split, split_key, seed)
        elif split is not None:
            raise ConfigError(
                "TableDataModule: split= parts one table; with train=, val=, … there is nothing to split."
            )
        self.batch_size = batch_size
        self._transform, self._eval_transform = transform, eval_transform
        self._options: dict[str, Any] = {
            "seed": seed,
            "image_size": image_size,
            "image_mode": image_mode,
            "on_error": on_error,
            "num_threads": num_threads,
            "prefetch": prefetch,
            "pin_memory": pin_memory,
            "cache": cache,
        }
        self._drop_last = drop_last
        self._num_workers = num_workers
        described = {f"{name}_table": f"{one.uri}@{one.version}" for name, one in self.tables.items()}
        kept = {"batch_size": batch_size, "split": dict(split) if split else None, "split_key": split_key, "seed": seed}
        kept |= {"image_size": image_size, "image_mode": image_mode, "drop_last": drop_last, "on_error": on_error}
        self.save_hyperparameters({**described, **kept})

    def train_dataloader(self) -> Loader | None:
        """Shuffled, transformed batches to train on; None when there are no such rows."""
        return self._loader("train")

    def val_dataloader(self) -> Loader | None:
        """Batches to validate on; None when there are no such rows."""
        return self._loader("val")

    def test_dataloader(self) -> Loader | None:
        """Batches to test on; None when there are no such rows."""
        return self._loader("test")

    def predict_dataloader(self) -> Loader | None:
        """Batches to predict, in the order of the table; None when there are no such rows."""
        return self._loader("predict")

    def _loader(self, stage: str) -> Loader | None:
        if stage not in self.tables:
            return None
        training = stage == "train"
        transform = self._transform if training else self._eval_transform
        return Loader(
            self.tables[stage],
            self.batch_size,
            shuffle=training,
            drop_last=training and self._drop_last,
            transform=transform,
            num_workers=self._num_workers if transform is not None else 0,
            **self._options,
        )


def _table(table: TableLike) -> Table:
    return table if isinstance(table, Table) else Table(table)


def _split(table: Table, shares: Mapping[str, float] | None, key: str | None, seed: int) -> dict[str, Table]:
    if shares is None:
        return {"train": table}
    for name in shares:
        if name not in _STAGES:
            raise ConfigError(f"split: unknown part {name!r}. {did_you_mean(name, _STAGES)}")
    return table.split(shares, key, seed)
