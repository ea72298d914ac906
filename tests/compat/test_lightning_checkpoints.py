"""Checkpoints that Lightning wrote, continued here: the same losses as Lightning's own continuation."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint.conversion import convert
from footplate.compat.checkpoints import translate

BATCHES, EPOCHS = 6, 3
_numbers = torch.Generator().manual_seed(0)
X, Y = torch.randn(16, 8, generator=_numbers), torch.randn(16, 1, generator=_numbers)


class Fixed(torch.utils.data.IterableDataset):
    """The same batch each time, so that the order doesn't matter."""

    def __iter__(self):
        return iter([(X, Y)] * BATCHES)

    def __len__(self):
        return BATCHES


class Net(pl.LightningModule):
    """Adam and a schedule; records its losses and learning rates."""

    def __init__(self, interval: str = "step") -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
        self.seen: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.seen.append((loss.item(), self.optimizers().param_groups[0]["lr"]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        every = 4 if self.hparams.interval == "step" else 1
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, every, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": self.hparams.interval}]


class Counting(pl.Callback):
    """Remembers the number of its calls."""

    count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def data() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Fixed(), batch_size=None)


def lightning_run(directory: Path, interval: str, rhythm: dict[str, Any], validate: Any, ckpt_path: Any = None) -> Net:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    saver = pl.callbacks.ModelCheckpoint(directory, filename="{step:02d}", save_top_k=-1, **rhythm)
    stopping = [pl.callbacks.EarlyStopping("val_loss", patience=9)] if validate else []
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[saver, Counting(), *stopping], num_sanity_val_steps=0, val_check_interval=validate or 1.0,
    )  # fmt: skip
    module = Net(interval)
    trainer.fit(module, data(), data() if validate else None, ckpt_path=ckpt_path, weights_only=True)
    return module


CASES = [
    pytest.param("step", {"every_n_train_steps": 4}, None, id="mid-epoch"),
    pytest.param("step", {"every_n_train_steps": 6}, None, id="with-an-epochs-last-step"),
    pytest.param("step", {}, None, id="at-an-epochs-end"),
    pytest.param("epoch", {"every_n_train_steps": 4}, None, id="mid-epoch-schedule-by-epoch"),
    pytest.param("epoch", {"every_n_train_steps": 6}, None, id="last-step-schedule-by-epoch"),
    pytest.param("epoch", {}, None, id="epochs-end-schedule-by-epoch"),
    pytest.param("epoch", {}, 1.0, id="after-validation"),
    pytest.param("step", {}, 0.5, id="after-validation-in-mid-epoch"),
    pytest.param("step", {"every_n_train_steps": 3}, 0.5, id="before-validation-in-mid-epoch"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", ["file", "converted"])
@pytest.mark.parametrize(("interval", "rhythm", "validate"), CASES)
def test_training_continues_from_a_lightning_checkpoint_as_it_would_there(
    interval, rhythm, validate, form, make_trainer, tmp_path, caplog
):
    lightning_run(tmp_path / "made", interval, rhythm, validate)
    for made in sorted((tmp_path / "made").iterdir())[:2]:
        step = torch.load(made, weights_only=True)["global_step"]
        there = lightning_run(tmp_path / "again", interval, rhythm, validate, made)
        source = made
        if form == "converted":
            source = tmp_path / f"{step}.ckpt"
            assert "order of the data" in convert(made, source)
        module, counting = Net(interval), Counting()
        callbacks = [counting, *([pl.callbacks.EarlyStopping("val_loss", patience=9)] if validate else [])]
        runner = make_trainer(
            max_epochs=EPOCHS, callbacks=callbacks, val_check_interval=validate, num_sanity_val_steps=0
        )
        with caplog.at_level(logging.INFO, "footplate"):
            runner.fit(module, data(), data() if validate else None, ckpt_path=source)
        assert module.seen == there.seen
        assert len(module.seen) == EPOCHS * BATCHES - step
        assert runner.global_step == EPOCHS * BATCHES
        assert "was made by Lightning 2.6.6" in caplog.text
        assert counting.count == EPOCHS * BATCHES


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_early_stopping_remembers_what_it_had_waited(make_trainer, tmp_path):
    class Worse(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", float(self.trainer.current_epoch))

    stopping = pl.callbacks.EarlyStopping("val_loss", patience=3)
    maker = pl.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[stopping], enable_checkpointing=False, num_sanity_val_steps=0,
    )  # fmt: skip
    maker.fit(Worse(), data(), data())
    assert stopping.wait_count == 2
    maker.save_checkpoint(tmp_path / "a.ckpt")
    runner = make_trainer(max_epochs=9, callbacks=[fp.EarlyStopping("val_loss", patience=3)], num_sanity_val_steps=0)
    runner.fit(Worse(), data(), data(), ckpt_path=tmp_path / "a.ckpt")
    assert runner.current_epoch == 4, "it waited for one epoch more, not for three"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_ordered_loader_goes_on_with_the_batch_that_comes_next(make_trainer, tmp_path):
    rows = torch.utils.data.TensorDataset(torch.arange(12.0).unsqueeze(1))

    class Rows(fp.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rows = nn.Linear(1, 1), []

        def training_step(self, batch, batch_idx):
            self.rows += batch[0].flatten().tolist()
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Theirs(pl.LightningModule):
        training_step, configure_optimizers = Rows.training_step, Rows.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rows = nn.Linear(1, 1), []

    saver = pl.callbacks.ModelCheckpoint(tmp_path, filename="a", every_n_train_steps=4)
    maker = pl.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[saver],
    )  # fmt: skip
    maker.fit(Theirs(), torch.utils.data.DataLoader(rows, 2))
    module = Rows()
    make_trainer(max_epochs=1).fit(module, torch.utils.data.DataLoader(rows, 2), ckpt_path=tmp_path / "a.ckpt")
    assert module.rows == [8, 9, 10, 11]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_data_module_gets_back_what_it_had_kept(make_trainer, tmp_path):
    class Data(pl.LightningDataModule):
        seen = 0

        def train_dataloader(self):
            self.seen += 1
            return data()

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state_dict):
            self.seen += state_dict["seen"]

    maker = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    maker.fit(Net(), Data())
    maker.save_checkpoint(tmp_path / "a.ckpt")
    again = Data()
    make_trainer(max_epochs=2).fit(Net(), again, ckpt_path=tmp_path / "a.ckpt")
    assert again.seen == 2


def test_weights_only_are_weights_only(tmp_path):
    state = {"pytorch-lightning_version": "2.6.6", "state_dict": {}, "epoch": 3, "global_step": 9, "loops": {}}
    translated = translate(state)
    assert "progress" not in translated
    assert (translated["epoch"], translated["global_step"]) == (3, 9)


def test_a_bare_file_of_weights_is_no_checkpoint(tmp_path):
    torch.save({"state_dict": {"w": torch.zeros(1)}}, tmp_path / "w.pt")
    with pytest.raises(fp.CheckpointError, match="holds weights alone"):
        convert(tmp_path / "w.pt", tmp_path / "a.ckpt")
    assert not checkpoint.exists(tmp_path / "a.ckpt")
