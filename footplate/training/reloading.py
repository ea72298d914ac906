"""Loaders that are made again in every n-th epoch (`reload_dataloaders_every_n_epochs`).

With n = 2, `train_dataloader()` and `val_dataloader()` of the module or data module are called before the first epoch, and
at the beginning of epochs 2, 4, …. A run that is resumed in epoch 3 needs the loaders of epoch 2. While they are made,
`trainer.current_epoch` is 2, and the global generators have the seeds that they had in epoch 2. So the loaders may depend
on these, and on what they read, and on nothing else.
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
    """Return the epoch in which the loaders of an epoch were made."""
    return epoch // every * every if every else 0


def resumed_epoch(loaded: dict[str, Any] | None) -> int:
    """Return the epoch in which a run state continues. 0 without a state."""
    progress = Progress()
    progress.load((loaded or {}).get("progress", {}))
    return progress.epoch


@contextlib.contextmanager
def making_loaders(run: Run, epoch: int) -> Iterator[None]:
    """Restore the epoch and the generators of the moment when an epoch's loaders were made first, for a `with` block."""
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
        ConfigError: the run was begun on another number of ranks.
    """
    state = loader.state_dict() if run.config.reload_dataloaders_every_n_epochs and run.launch_id is None else {}
    for part_state in [state, *(part["state"] for part in state.get("parts", []))]:
        if part_state.get("global_batch_size", 0) != part_state.get("batch_size", 0) * run.data_ranks:
            raise ConfigError(
                "reload_dataloaders_every_n_epochs: the run began on another number of ranks, and new loaders would have "
                "other global batches. "
                f"Continue on {part_state['global_batch_size'] // part_state['batch_size']} ranks, or leave the argument "
                "out."
            )
