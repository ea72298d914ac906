"""A data module over tables, for the common case: one table that is split, or a table for each stage.

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
    """Loaders over tables. Training rows are shuffled and transformed. Evaluation has the rows in the table's order.

    Args:
        table: the only table, or its path. `split` splits it; without it, all rows are for training.
        train: instead of `table`, a table (or its path) of rows to train on.
        val: rows to validate on.
        test: rows to test on.
        predict: rows to predict.
        batch_size: rows of one rank's batch.
        split: shares of `table`, such as `{"train": 0.9, "val": 0.1}`; see `Table.split`.
        split_key: rows with an equal value in this column stay in the same part.
        seed: seed of the split, the order and the row generators.
        image_size: see `Loader`.
        image_mode: see `Loader`.
        transform: a function of a training row; see `footplate.data.pipeline.row_transform`.
        eval_transform: a function of a row to validate on, to test on or to predict. A function that prepares rows,
            rather than augments them, belongs in both.
        drop_last: leave out training rows that don't fill a global batch.
        group_by_length: a column; batches to train on have rows of similar length in it. See `Loader`.
        on_error: see `Loader`.
        num_threads: see `Loader`.
        prefetch: see `Loader`.
        num_workers: see `Loader`. It applies to loaders with a transform.
        pin_memory: see `Loader`.
        cache: see `Loader`.

    Raises:
        ConfigError: neither or both of `table` and `train`/`val`/…, or an unknown name in `split`.
        DataError: a table can't be opened.

    Examples:
        >>> data = fp.TableDataModule("flowers.parquet", batch_size=2, split={"train": 0.5, "val": 0.5}, seed=1)
        >>> fp.Trainer(max_epochs=1).fit(table_model, data)
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
        group_by_length: str | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        num_threads: int | Literal["auto"] = "auto",
        prefetch: int | Literal["auto"] = "auto",
        num_workers: int = 0,
        pin_memory: bool | None = None,
        cache: DecodedCache | str | os.PathLike[str] | None = None,
    ) -> None:
        stages = {"train": train, "val": val, "test": test, "predict": predict}
        self.tables: dict[str, Table] = {name: _table(value) for name, value in stages.items() if value is not None}
        if (table is None) == (not self.tables):
            raise ConfigError("TableDataModule: give either one table (with split=), or train=, val=, test=, predict=.")
        if table is not None:
            self.tables = _split(_table(table), split, split_key, seed)
        elif split is not None:
            raise ConfigError(
                "TableDataModule: split= splits one table. With train=, val=, … there is nothing to split: leave "
                "split= out."
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
        self._group_by_length = group_by_length
        self._num_workers = num_workers

        # The hyperparameters describe the tables, instead of holding them.
        described = {f"{name}_table": f"{part.uri}@{part.version}" for name, part in self.tables.items()}
        options = {
            "batch_size": batch_size,
            "split": dict(split) if split else None,
            "split_key": split_key,
            "seed": seed,
        }
        options |= {"image_size": image_size, "image_mode": image_mode, "drop_last": drop_last, "on_error": on_error}
        options |= {"group_by_length": group_by_length}
        self.save_hyperparameters({**described, **options})

    def train_dataloader(self) -> Loader | None:
        """Return shuffled, transformed batches to train on; None if there are no such rows."""
        return self._loader("train")

    def val_dataloader(self) -> Loader | None:
        """Return batches to validate on; None if there are no such rows."""
        return self._loader("val")

    def test_dataloader(self) -> Loader | None:
        """Return batches to test on; None if there are no such rows."""
        return self._loader("test")

    def predict_dataloader(self) -> Loader | None:
        """Return batches to predict, in the order of the table; None if there are no such rows."""
        return self._loader("predict")

    def _loader(self, stage: str) -> Loader | None:
        if stage not in self.tables:
            return None
        is_training = stage == "train"
        transform = self._transform if is_training else self._eval_transform
        options = self._options
        # A cache of lengths is for the training rows alone.
        if self._group_by_length is not None and options["image_size"] is None and not is_training:
            options = {**options, "cache": None}
        return Loader(
            self.tables[stage],
            self.batch_size,
            shuffle=is_training,
            drop_last=is_training and self._drop_last,
            group_by_length=self._group_by_length if is_training else None,
            transform=transform,
            num_workers=self._num_workers if transform is not None else 0,
            **options,
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
