"""How batches come to a step: read and moved when it asks for them, or by a thread ahead of it.

    at the step     loader → [transfer hooks] → device → on_after_batch_transfer → step
    ahead of it     loader → device  ─(2 batches wait there)─►  on_after_batch_transfer → step

Ahead of the step is for accelerators to which copies go on beside the work (`Accelerator.batches_ahead`), and only where
nothing can tell the difference but the clock: the loader makes its batches in threads or processes of its own (else what
its author wrote would run beside the step, and draw from the same generators), and nobody has a hook before the device.
`on_after_batch_transfer` is part of the step in both cases: in the main thread, under the step's seed.

No more batches are read than the step will ask for, as far as that is known; what fails is raised at the step that would
have had the batch; and the loader's position, in a checkpoint, is that of the last batch that was handed out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from footplate.data.adapters.workers import made_in_background
from footplate.data.pipeline.prefetch import Prefetcher
from footplate.distributed.uneven_loaders import close
from footplate.hardware.transfer import moves_plainly

if TYPE_CHECKING:
    from footplate.training.run import Run

_END = object()


def read_ahead(run: Run, loader: Any, stage: str) -> Prefetcher | None:
    """What puts a loader's batches onto the device ahead of the step; None where they come at the step.

    Args:
        run: with its step.
        loader: whose batches.
        stage: "training", "validation", "test" or "predict".
    """
    count = run.accelerator.batches_ahead
    if not count or not made_in_background(loader) or not moves_plainly(run.module, run.datamodule):
        return None
    if run.accelerator.owns_weights and run.transfer(moved=True) is not None:
        return None  # the step's own copy of the batch would be made before on_after_batch_transfer
    move = run.step.mover(stage)
    return None if move is None else Prefetcher(loader, move, run.device, count)


def batches_of(loader: Any, ahead: Prefetcher | None, most: float) -> Iterator[Any]:
    """A pass over a loader, of which at most so many batches will be asked for."""
    return iter(loader) if ahead is None else ahead.first(most)


def timed(batches: Iterator[Any], run: Run) -> Iterator[Any]:
    """The same batches; `run.data_wait_s` counts the seconds for which the device has waited for them."""
    idle = run.step.idle
    try:
        while True:
            asked = time.perf_counter()
            batch = next(batches, _END)
            if idle():  # else the host has only run ahead of the device
                run.data_wait_s = (run.data_wait_s or 0.0) + time.perf_counter() - asked
            if batch is _END:
                return
            yield batch
    finally:
        close(batches)
