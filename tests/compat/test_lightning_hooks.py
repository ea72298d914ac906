"""Hooks of docs/reference/lightning.md: each is called, or refused with an error before training begins."""

from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from models import table
from models.recording import Record, trainer_of, watched
from models.table import Row, ids, named
from models.zoo import Evaluated, Plain, loaders

import footplate as fp


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Hooks of a module that run in a fit that is resumed once, a validation, a test and a prediction."""
    directory = tmp_path_factory.mktemp("called")
    record = Record()

    class All(Evaluated):
        def prepare_data(self) -> None:
            record.hooks.add("prepare_data")

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            record.hooks.add("transfer_batch_to_device")
            return batch

        def train_dataloader(self) -> Any:
            return loaders()[0]

        def val_dataloader(self) -> Any:
            return loaders()[1]

        test_dataloader = predict_dataloader = val_dataloader

        def setup(self, stage: str) -> None:
            record.hooks.add("setup")

        def teardown(self, stage: str) -> None:
            record.hooks.add("teardown")

        def configure_model(self) -> None:
            record.hooks.add("configure_model")

        def configure_callbacks(self) -> list[Any]:
            return []

    for epochs in (1, 2):
        module = watched(All(), record)
        trainer = trainer_of("footplate", record, directory, max_epochs=epochs, enable_checkpointing=True)
        trainer.fit(module, ckpt_path="last")
    for stage in (trainer.validate, trainer.test):
        stage(module, verbose=False)
    trainer.predict(module)
    return record.hooks | {event.name for event in record.events if event.who == "module"}


@pytest.mark.parametrize("row", named(table.HOOKS, "supported", "different"), ids=ids)
def test_hook_is_called(row: Row, called: set[str]) -> None:
    assert row.name in called


@pytest.mark.parametrize("row", named(table.HOOKS, "refused"), ids=ids)
def test_hook_is_refused_before_training(row: Row, make_trainer: Any) -> None:
    module = type("Mine", (Plain,), {row.name: lambda self, *args: None})()

    with pytest.raises(fp.ConfigError, match=rf"^Mine\.{row.name}\(\) is not supported: {re.escape(row.note)}\.$"):
        make_trainer().fit(module, *loaders())


@pytest.mark.parametrize("argument", ["dataloader_iter", "optimizer_idx"])
def test_step_that_asks_for_more_than_a_batch_is_refused_before_training(argument: str, make_trainer: Any) -> None:
    class Mine(Plain):
        def on_fit_start(self) -> None:
            raise AssertionError("training has begun")

    scope: dict[str, Any] = {}
    exec(f"def training_step(self, batch, batch_idx, {argument}): ...", scope)
    Mine.training_step = scope["training_step"]

    with pytest.raises(fp.ConfigError, match=argument):
        make_trainer().fit(Mine(), *loaders())


@pytest.mark.parametrize("row", table.DATAMODULE, ids=ids)
def test_data_module_is_used(row: Row, make_trainer: Any) -> None:
    """The hook is called in a fit that fails at its end, in the fit that resumes it, and in a test and a prediction."""
    used: set[str] = set()

    def noting(name: str) -> Any:
        def note(self: Any, *args: Any, **named: Any) -> Any:
            used.add(name)
            if "dataloader" in name:
                return loaders()[name != "train_dataloader"]
            return args[0] if "batch" in name else {"kept": 1} if name == "state_dict" else None

        return note

    names = [hook.name for hook in table.DATAMODULE if hook.name != "from_datasets"]
    kind = type("Data", (pl.LightningDataModule,), {name: noting(name) for name in names})

    class Fails(Evaluated):
        def on_train_end(self) -> None:
            raise RuntimeError("mine")

    if row.name == "from_datasets":
        data = pl.LightningDataModule.from_datasets(loaders()[0].dataset, batch_size=4)
        make_trainer(max_epochs=1).fit(Plain(), datamodule=data)
        return
    with pytest.raises(RuntimeError, match="mine"):
        make_trainer(max_epochs=1).fit(Fails(), datamodule=kind())
    make_trainer(max_epochs=2).fit(Evaluated(), datamodule=kind(), ckpt_path="last")
    runner = make_trainer()
    runner.test(Evaluated(), datamodule=kind(), verbose=False)
    runner.predict(Evaluated(), datamodule=kind())

    assert row.name in used
