"""Source of a step's batches: read and moved when the step asks, or prefetched by a thread.

    at the step     loader → [transfer hooks] → device → on_after_batch_transfer → step
    prefetched      loader → device  ─(2 batches wait there)─►  on_after_batch_transfer → step

Prefetching is for accelerators that copy while they compute (`Accelerator.batches_ahead`). It is used only if nothing but
the clock can tell the difference. The loader must make its batches in its own threads or processes: otherwise the user's
code would run beside the step, and draw from the same generators. No hook may run before the device.
`on_after_batch_transfer` is part of the step in both cases: it runs in the main thread, under the step's seed.

A prefetcher reads no more batches than the step will ask for, as far as this is known. An error is raised at the step that
would have had the batch. The loader's position in a checkpoint is that of the last batch which was handed out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from footplate.data.adapters.workers import made_in_background
from footplate.data.pipeline.prefetch import Prefetcher
from footplate.hardware.transfer import moves_plainly

if TYPE_CHECKING:
    from footplate.training.run import Run


def read_ahead(run: Run, loader: Any, stage: str) -> Prefetcher | None:
    """Return the prefetcher of a loader. None if its batches come at the step.

    Args:
        run: its step is ready.
        loader: the loader to read from.
        stage: "training", "validation", "test" or "predict".
    """
    count = run.accelerator.batches_ahead
    if not count or not made_in_background(loader) or not moves_plainly(run.module, run.datamodule):
        return None
    if run.accelerator.owns_weights and run.transfer(moved=True) is not None:
        # The step would copy the batch before on_after_batch_transfer.
        return None
    move = run.step.mover(stage)
    return None if move is None else Prefetcher(loader, move, run.device, count)


def batches_of(loader: Any, ahead: Prefetcher | None, most: float) -> Iterator[Any]:
    """Return a pass over a loader, of which at most `most` batches will be used."""
    return iter(loader) if ahead is None else ahead.first(most)
