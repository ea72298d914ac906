"""Training loops for `step_overhead.py`: one tiny model, one optimizer, the same batches.

Each loop takes the batches (an iterable with a length, whose iterator also keeps the time) and a directory for its files.
It trains until the batches are used up. The "full" loops have the output of a typical training: a progress bar, a CSV file,
MLflow, two logged metrics (one of them on the bar), and a checkpoint every 500 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import let_torchvision_be_imported
from torch import nn

Loop = Callable[[Any, Path], None]  # (batches, directory)
CHECKPOINT_EVERY = 500
OFF: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def raw(batches: Any, directory: Path) -> None:
    model = network()
    adamw = optimizer(model)
    for x, y in batches:
        adamw.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        adamw.step()


def module(base: Any, logs: bool) -> Any:
    """The same module for Footplate and Lightning."""

    class Tiny(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer(self)

    class TinyThatLogs(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss)
            self.log("loss_on_the_bar", loss, prog_bar=True)
            return loss

    return TinyThatLogs() if logs else Tiny()


def footplate_full(batches: Any, directory: Path) -> None:
    import footplate as fp

    trainer = fp.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=[fp.CSV(), fp.MLflow("overhead", log_model=False)],
        callbacks=fp.ModelCheckpoint(every_n_train_steps=CHECKPOINT_EVERY),
        default_root_dir=directory / "run",
    )
    trainer.fit(module(fp.Module, logs=True), batches)


def footplate_bare(batches: Any, directory: Path) -> None:
    import footplate as fp

    trainer = fp.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=directory, **OFF)
    trainer.fit(module(fp.Module, logs=False), batches)


def lightning_full(batches: Any, directory: Path) -> None:
    let_torchvision_be_imported()
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=[CSVLogger(directory), MLFlowLogger("overhead", tracking_uri=f"sqlite:///{directory / 'mlflow.db'}")],
        callbacks=[ModelCheckpoint(dirpath=directory / "checkpoints", every_n_train_steps=CHECKPOINT_EVERY)],
        default_root_dir=directory,
    )
    trainer.fit(module(pl.LightningModule, logs=True), batches)


def lightning_bare(batches: Any, directory: Path) -> None:
    let_torchvision_be_imported()
    import lightning.pytorch as pl

    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=directory, **OFF)
    trainer.fit(module(pl.LightningModule, logs=False), batches)


def fabric(batches: Any, directory: Path) -> None:
    let_torchvision_be_imported()
    from lightning.fabric import Fabric

    plain = network()
    runtime = Fabric(accelerator="cpu", devices=1)
    model, adamw = runtime.setup(plain, optimizer(plain))
    for x, y in batches:
        adamw.zero_grad()
        loss = F.cross_entropy(model(x), y)
        runtime.backward(loss)
        adamw.step()


def accelerate(batches: Any, directory: Path) -> None:
    from accelerate import Accelerator

    plain = network()
    runtime = Accelerator(cpu=True)
    model, adamw = runtime.prepare(plain, optimizer(plain))
    for x, y in batches:
        adamw.zero_grad()
        loss = F.cross_entropy(model(x), y)
        runtime.backward(loss)
        adamw.step()


VARIANTS: dict[str, Loop] = {
    "raw loop": raw,
    "footplate": footplate_full,
    "footplate bare": footplate_bare,
    "fabric": fabric,
    "accelerate": accelerate,
    "lightning bare": lightning_bare,
    "lightning": lightning_full,
}
