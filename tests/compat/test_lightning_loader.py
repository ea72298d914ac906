"""A `Loader` under Lightning's own trainer: Lightning's checkpoints have its position, and each epoch has its own order."""

from __future__ import annotations

import itertools
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from models.recording import quiet

import footplate as fp

BATCHES = 9


class Seeing(pl.LightningModule):
    """Keeps the rows of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen.append(batch["id"].tolist())
        return self.layer(batch["id"][:, None].float()).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trained(directory: Path, ckpt_path: Path | None = None) -> list[list[int]]:
    loader = fp.Loader(fp.Table({"id": list(range(4 * BATCHES))}), 4, shuffle=True, seed=3)
    module, saving = Seeing(), pl.callbacks.ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=-1)
    with quiet():
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_epochs=3, callbacks=[saving], logger=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    return module.seen


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Checkpoints of an uninterrupted run, one after each step, and the rows that it saw."""
    directory = tmp_path_factory.mktemp("whole")
    return directory, trained(directory)


def test_each_epoch_has_all_rows_in_another_order(whole: tuple[Path, list[list[int]]]) -> None:
    _, seen = whole
    epochs = [[*itertools.chain(*seen[start : start + BATCHES])] for start in range(0, 3 * BATCHES, BATCHES)]

    assert [sorted(epoch) for epoch in epochs] == [list(range(4 * BATCHES))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("step", [1, BATCHES - 1, BATCHES, BATCHES + 5, 2 * BATCHES])
def test_a_run_goes_on_with_the_rows_that_were_next(
    step: int, whole: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    directory, seen = whole

    assert trained(tmp_path, directory / f"step={step}.ckpt") == seen[step:]
