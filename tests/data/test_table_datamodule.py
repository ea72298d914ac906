"""A data module over tables: splits, stages and hyperparameters."""

from __future__ import annotations

import pytest

from footplate.core.errors import ConfigError
from footplate.data import Table
from footplate.training.table_datamodule import TableDataModule


def test_one_table_is_split_into_stages(delta: str) -> None:
    data = TableDataModule(delta, batch_size=16, split={"train": 0.8, "val": 0.2}, seed=5)
    train, val = data.train_dataloader(), data.val_dataloader()
    assert train is not None
    assert val is not None
    assert (train.shuffle, val.shuffle, train.seed) == (True, False, 5)
    rows = [number for loader in (train, val) for batch in loader for number in batch["id"].tolist()]
    assert sorted(rows) == list(range(200))
    assert data.test_dataloader() is None


def test_tables_of_their_own_for_each_stage(delta: str, parquet: str) -> None:
    data = TableDataModule(train=delta, val=Table(parquet), predict=parquet)
    assert data.tables["train"].num_rows == 200
    loader = data.predict_dataloader()
    assert loader is not None
    assert [number for batch in loader for number in batch["id"].tolist()] == list(range(103))


def test_the_transform_is_for_training_only(delta: str) -> None:
    split = {"train": 0.5, "val": 0.5}
    data = TableDataModule(Table(delta, columns=["id"]), split=split, transform=lambda row: {"other": row["id"]})
    train, val = data.train_dataloader(), data.val_dataloader()
    assert train is not None
    assert val is not None
    assert list(next(iter(train))) == ["other"]
    assert list(next(iter(val))) == ["id"]


def test_it_records_its_hyper_parameters(delta: str) -> None:
    data = TableDataModule(delta, batch_size=16, split={"train": 0.8, "val": 0.2}, image_size=8)
    assert data.hparams.batch_size == 16
    assert data.hparams.split == {"train": 0.8, "val": 0.2}
    assert data.hparams.train_table == f"{delta}@3"


def test_tables_and_splits_that_contradict_each_other_are_refused(delta: str) -> None:
    with pytest.raises(ConfigError, match="either one table"):
        TableDataModule()
    with pytest.raises(ConfigError, match="either one table"):
        TableDataModule(delta, train=delta)
    with pytest.raises(ConfigError, match="nothing to split"):
        TableDataModule(train=delta, split={"train": 1.0})
    with pytest.raises(ConfigError, match='Did you mean "train"'):
        TableDataModule(delta, split={"trian": 0.9})
