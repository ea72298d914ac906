"""Training loops for `ddp_overhead.py`: the loops of `step_variants.py`, each as one of two ranks.

Every rank trains on its own batches. Gloo averages the gradients. The "full" loops have a progress bar, a CSV file, two
logged metrics (one of them on the bar), and a checkpoint every 500 steps.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from common import let_torchvision_be_imported
from step_variants import CHECKPOINT_EVERY, OFF, Loop, module, network, optimizer
from torch.nn.parallel import DistributedDataParallel

BATCH = 32


class SharedOut:
    """Batches like a `footplate.data.Loader`: the shard is already chosen, and all ranks have equally many batches."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._batch = 0
        self.global_batch_size = 2 * BATCH

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self._batch += 1
            yield batch

    def rank_rows(self, batch: int) -> int:
        return BATCH

    def batch_rows(self, batch: int) -> int:
        return 2 * BATCH

    def set_epoch(self, epoch: int) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self._batch}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def raw(batches: Any, directory: Path) -> None:
    dist.init_process_group("gloo")
    _raw(batches)
    leave_group()


def _raw(batches: Any) -> None:
    model = DistributedDataParallel(network())
    adamw = optimizer(model)
    for x, y in batches:
        adamw.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        adamw.step()


def leave_group() -> None:
    """Destroy the process group after the modules that use it.

    A DistributedDataParallel that is the last owner of its group may never stop waiting. It joins gloo's thread with the
    GIL held, and the thread may need the GIL to free its last work.
    """
    gc.collect()
    dist.destroy_process_group()


def footplate_bare(batches: Any, directory: Path) -> None:
    _footplate(SharedOut(batches), directory, logs=False, **OFF)


def footplate_any_iterable(batches: Any, directory: Path) -> None:
    _footplate(batches, directory, logs=False, **OFF)


def footplate_full(batches: Any, directory: Path) -> None:
    import footplate as fp

    saving = fp.ModelCheckpoint(every_n_train_steps=CHECKPOINT_EVERY)
    _footplate(SharedOut(batches), directory, logs=True, logger=fp.CSV(), callbacks=saving)


def _footplate(batches: Any, directory: Path, logs: bool, **settings: Any) -> None:
    import footplate as fp

    trainer = fp.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=directory / "run", **settings)
    trainer.fit(module(fp.Module, logs), batches)


def lightning_bare(batches: Any, directory: Path) -> None:
    _lightning(batches, directory, logs=False, **OFF)
    leave_group()


def lightning_full(batches: Any, directory: Path) -> None:
    let_torchvision_be_imported()
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    saving = ModelCheckpoint(dirpath=directory / "checkpoints", every_n_train_steps=CHECKPOINT_EVERY)
    _lightning(batches, directory, logs=True, logger=CSVLogger(directory), callbacks=[saving])
    leave_group()


def _lightning(batches: Any, directory: Path, logs: bool, **settings: Any) -> None:
    let_torchvision_be_imported()
    import lightning.pytorch as pl

    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, default_root_dir=directory, **settings
    )
    trainer.fit(module(pl.LightningModule, logs), batches)


VARIANTS: dict[str, Loop] = {
    "raw DDP loop": raw,
    "footplate bare": footplate_bare,
    "footplate bare, any iterable": footplate_any_iterable,
    "footplate": footplate_full,
    "lightning bare": lightning_bare,
    "lightning": lightning_full,
}
