"""Loaders that are made again every so many epochs (`reload_dataloaders_every_n_epochs`).

With n = 2, `train_dataloader()` and `val_dataloader()` of the module or data module are called before the first epoch, and
at the beginning of epochs 2, 4, …. A run that is resumed in epoch 3 has the loaders of epoch 2: while they are made,
`trainer.current_epoch` says 2, and the global generators are seeded as they were then. So they must follow from these
(and from what they read) alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from footplate.checkpoint.run_state import Progress
from footplate.core import rng
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from footplate.training.run import Run


def made_at(epoch: int, every: int) -> int:
    """In which epoch the loaders of an epoch were made."""
    return epoch // every * every if every else 0


def resumed_epoch(loaded: dict[str, Any] | None) -> int:
    """The epoch that a run state continues in; 0 without one."""
    progress = Progress()
    progress.load((loaded or {}).get("progress", {}))
    return progress.epoch


@contextlib.contextmanager
def making_loaders(run: Run, epoch: int) -> Iterator[None]:
    """While loaders are made that an epoch uses, everything is as in the epoch when they were made first."""
    every = run.config.reload_dataloaders_every_n_epochs
    first = made_at(epoch, every)
    if not every:
        yield
        return
    progress, generators = run.progress, rng.capture()
    run.progress = dataclasses.replace(progress, epoch=first)
    if first:
        rng.seed_globals(rng.mix(run.seed, first))
    try:
        yield
    finally:
        run.progress = progress
        if first:
            rng.restore(generators)


def check_same_ranks(run: Run, loader: Any) -> None:
    """Refuse to make loaders again in a run whose global batches are those of another number of ranks.

    Raises:
        ConfigError: such a run.
    """
    state = loader.state_dict() if run.config.reload_dataloaders_every_n_epochs and run.launch_id is None else {}
    for one in [state, *(part["state"] for part in state.get("parts", []))]:
        if one.get("global_batch_size", 0) != one.get("batch_size", 0) * run.world.size:
            raise ConfigError(
                "reload_dataloaders_every_n_epochs: the run was begun on another number of ranks, whose global batches new "
                f"loaders would not have. Continue on {one['global_batch_size'] // one['batch_size']}, or leave it out."
            )
