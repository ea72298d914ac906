"""Several steps in one call of a compiled program: how many, at which learning rates, and when not.

Such a call begins and ends between two steps. Validation, a save, and the end of an epoch or of the run are due between two
calls. So a call of several steps is made only if the next such point is far enough. Until then, the steps are made one by
one. The learning rates that schedulers set after each step are computed in advance: the schedulers step ahead, and are then
put back.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from footplate.callbacks import ModelCheckpoint
from footplate.core.hooks import overrides

if TYPE_CHECKING:
    from footplate.training.loop import TrainingLoop
    from footplate.training.run import Run


def between_any_two(run: Run) -> str | None:
    """Return what must happen between any two steps, as the end of a sentence. None if nothing must."""
    if run.config.accumulate_grad_batches != 1:
        return f"accumulate_grad_batches={run.config.accumulate_grad_batches} makes one step of several batches"
    if not run.module.automatic_optimization:
        return f"{type(run.module).__name__} optimises by hand"
    for name in ("on_train_batch_start", "on_train_batch_end"):
        for reader in run.hooks.weight_readers(name):
            return f"{reader} overrides {name}() and may look at the weights after each step"
    by_step = [config for config in run.lr_scheduler_configs if config.interval == "step"]
    if by_step and overrides(run.module, "lr_scheduler_step"):
        return f"{type(run.module).__name__} overrides lr_scheduler_step(), which sets the next step's learning rate"
    for config in by_step:
        if config.reduce_on_plateau:
            return f"{type(config.scheduler).__name__} sets the next step's learning rate by a metric of this one"
    return None


def next_chunk(loop: TrainingLoop, most: int) -> int:
    """Return the number of batches of the next call: `most`, or one if something is due before."""
    return most if until_due(loop) >= most else 1


def until_due(loop: TrainingLoop) -> float:
    """Return the number of batches until the next point at which something is due."""
    run = loop.run
    progress = run.progress
    points = [run.num_training_batches - progress.batch_idx]
    if loop.val_loaders and math.isfinite(run.val_check_batches):
        done = progress.batches if run.config.check_val_every_n_epoch is None else progress.batch_idx
        points.append(run.val_check_batches - done % run.val_check_batches)
    if run.config.max_steps != -1:
        points.append(run.config.max_steps - progress.global_step)
    for callback in run.callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.every_n_train_steps:
            points.append(callback.every_n_train_steps - progress.global_step % callback.every_n_train_steps)
    return min(points)


def rates_ahead(run: Run, count: int) -> list[list[float]]:
    """Return the learning rates of the next `count` steps, in the form of `rates_of`."""
    # Imported here, since it imports everything that a capture needs.
    from footplate.step.xla.capture.torch_optimizers import rates_of

    (optimizer,) = run.optimizers
    configs = [config for config in run.lr_scheduler_configs if config.interval == "step"]
    if not configs:
        return [rates_of(optimizer)] * count
    kept = [copy.deepcopy(config.scheduler.state_dict()) for config in configs]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    try:
        rates = []
        for step in range(run.progress.global_step + 1, run.progress.global_step + count + 1):
            rates.append(rates_of(optimizer))
            for config in configs:
                if step % config.frequency == 0:
                    config.scheduler.step()
        return rates
    finally:
        for config, state in zip(configs, kept, strict=True):
            config.scheduler.load_state_dict(state)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)


def chunks(batches: Iterator[Any], size: int) -> Iterator[Sequence[Any]]:
    """Return batches in chunks of `size`. The last chunk may be shorter."""
    if size == 1:
        # C code builds these tuples of one batch.
        return zip(batches, strict=False)
    return iter(lambda: tuple(itertools.islice(batches, size)), ())


def varying(batches: Iterator[Any], size: Callable[[], int]) -> Iterator[Sequence[Any]]:
    """Return batches in chunks. `size()` gives the size of the next chunk. The last may be shorter."""
    return iter(lambda: tuple(itertools.islice(batches, size())), ())


def each_transferred(
    batches: Sequence[Any], first: int, seed_step: Callable[[int], None], transfer: Callable[[Any, int], Any]
) -> list[Any]:
    """Run the batches of a chunk through their transfer hooks, each under its own step's seed. Leave the first's."""
    moved = []
    for number, batch in enumerate(batches, first):
        seed_step(number)
        moved.append(transfer(batch, 0))
    seed_step(first)
    return moved
