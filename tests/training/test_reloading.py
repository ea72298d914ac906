"""Loaders that are recreated every few epochs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.small import Classifier, dataset, loader
from torch.utils.data import DataLoader, Subset

import footplate as fp


class Growing(Classifier):
    """Makes loaders that depend on the epoch and on the global generator. It records its training data."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []
        self.seen: list[str] = []
        self.validated: list[str] = []

    def _loader(self, name: str) -> Any:
        epoch = self.trainer.current_epoch
        self.made.append((name, epoch))
        return DataLoader(Subset(dataset(), torch.randperm(120)[: 20 + 10 * epoch].tolist()), 5, shuffle=True)

    def train_dataloader(self) -> Any:
        return self._loader("train")

    def val_dataloader(self) -> Any:
        return self._loader("val")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[0].sum().item().hex())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(batch[0].sum().item().hex())


class Saves(fp.Callback):
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.batches == self.batches:
            trainer.save_checkpoint(trainer.run_dir / "cut.ckpt")


@pytest.mark.parametrize("cut", [10, 20, 25])
def test_a_run_resumes_with_the_loaders_that_it_had(make_trainer: Any, cut: int) -> None:
    torch.manual_seed(3)
    whole = Growing()
    arguments = {"max_epochs": 5, "reload_dataloaders_every_n_epochs": 2}
    make_trainer(**arguments, callbacks=[Saves(cut)]).fit(
        whole
    )  # 4 batches in each of two epochs, 8 in each of two, 12
    assert whole.made == [(name, epoch) for epoch in (0, 2, 4) for name in ("train", "val")]
    assert len(whole.seen) == 4 + 4 + 8 + 8 + 12
    rest, made = Growing(), make_trainer(**arguments)
    made.fit(rest, ckpt_path=made.run_dir / "cut.ckpt")
    assert rest.made[0] == ("train", 2 if cut < 24 else 4)
    assert rest.seen == whole.seen[cut:]
    assert rest.validated == whole.validated[-len(rest.validated) :]
    assert all(torch.equal(value, rest.state_dict()[name]) for name, value in whole.state_dict().items())


def test_loaders_that_were_given_stay(make_trainer: Any) -> None:
    module = Growing()
    make_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(module, loader(20), loader(10))
    assert module.made == []
    assert len(module.seen) == 6


def test_a_number_that_is_none_is_refused(make_trainer: Any) -> None:
    with pytest.raises(fp.ConfigError, match="reload_dataloaders_every_n_epochs=-1: expected an integer"):
        make_trainer(reload_dataloaders_every_n_epochs=-1)
