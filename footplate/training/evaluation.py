"""Evaluation: one pass over loaders without training. Validation, testing and prediction are the same pass.

For each loader and each of its batches, in evaluation mode and without gradients:

    batch hooks start → validation_step (or test_step, predict_step) → batch hooks end

Afterwards, every submodule is back in the mode that it had.

With several ranks, each evaluates its share of the rows, and no row is evaluated twice. If every rank has as many batches,
the ranks agree on signals between batches, otherwise at the end. A rank whose share of a batch is empty skips the batch. If
the forward pass is collective, it runs on another rank's row instead, and the result doesn't count.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from footplate.core import rng
from footplate.core.hooks import Hook, overrides
from footplate.core.stacks import answering
from footplate.data.adapters.evaluation import tell_samplers
from footplate.data.adapters.logical_loader import LogicalBatch, LogicalLoader
from footplate.data.adapters.rank_shares import even, weigher
from footplate.distributed.leaf_buffers import OwnBuffers
from footplate.distributed.uneven_loaders import close, together
from footplate.training.loaders import LOADERS
from footplate.training.logical import EVALUATION
from footplate.training.metrics import MetricLog, Values
from footplate.training.prefetching import batches_of, read_ahead
from footplate.training.profiling import Profile, profiled_batches, recorder
from footplate.training.rank_checks import check_order, same_rows
from footplate.training.saving import end_on_signal

if TYPE_CHECKING:
    from footplate.training.run import Run

HOOKS = {"validate": "validation", "test": "test", "predict": "predict"}


@dataclass(frozen=True)
class _Pass:
    """What is the same for all loaders of a pass.

    Attributes:
        run: its step and hooks are ready.
        stage: "validate", "test" or "predict".
        several: there are several loaders, so hooks and the step function get the index of theirs.
        batch_start: the overridden hooks at the beginning of a batch.
        batch_end: the overridden hooks at its end.
        profile: records the wait for each batch. None without a profiler that records actions.
        buffers: the buffers of each logical rank of this process. None without logical ranks.
        sink: see `evaluate`.
    """

    run: Run
    stage: str
    several: bool
    batch_start: tuple[Hook, ...]
    batch_end: tuple[Hook, ...]
    profile: Profile | None
    buffers: OwnBuffers | None
    sink: Any


def evaluate(run: Run, stage: str, loaders: list[Any], limits: list[float], sink: Any = None) -> Values:
    """Run a stage ("validate", "test" or "predict") over some loaders.

    Args:
        run: its step and hooks are ready.
        stage: which step function runs.
        loaders: iterables of batches.
        limits: the number of batches of each loader.
        sink: called with (output, batch_idx, dataloader_idx) of every batch, if given.

    Returns:
        The reduced metrics.
    """
    name = HOOKS[stage]
    module, hooks = run.module, run.hooks
    log = run.new_metrics(by_step=False)
    profile = recorder(run.profiler)
    batch_start, batch_end = hooks.get(f"on_{name}_batch_start"), hooks.get(f"on_{name}_batch_end")

    # A training step may use tensors that validation inside fit() has made, and autograd refuses inference tensors.
    inference_mode = run.config.inference_mode and run.stage != "fit" and not run.parallel.lockstep

    with run.logging_to(log), evaluation_mode(module, name), gradients_off(inference_mode):
        run.parallel.sync_buffers(module)
        hooks.call(f"on_{name}_start")
        hooks.call(f"on_{name}_epoch_start")
        run.step.gather(name)
        buffers = None if run.logical is None else OwnBuffers(module, len(run.logical.own))

        evaluation = _Pass(run, stage, len(loaders) > 1, batch_start, batch_end, profile, buffers, sink)
        for index, (loader, limit) in enumerate(zip(loaders, limits, strict=True)):
            _evaluate_loader(evaluation, index, loader, limit)

        if buffers is not None:
            # Those of logical rank 0 stay.
            buffers.enter(0)
            run.parallel.sync_buffers(module)
        run.agreement.settle()
        if run.agreement.interrupted:
            end_on_signal(run)
        return _end_epoch(run, name, log)


def _evaluate_loader(evaluation: _Pass, index: int, loader: Any, limit: float) -> None:
    """Evaluate the batches of the loader with this index, at most `limit` of them."""
    run, sink, buffers = evaluation.run, evaluation.sink, evaluation.buffers
    name, module, step, log = HOOKS[evaluation.stage], run.module, run.step, run.metrics
    batch_start, batch_end = evaluation.batch_start, evaluation.batch_end
    agreement, lockstep = run.agreement, run.parallel.lockstep
    dataloader_idx = log.dataloader_idx = index if evaluation.several else None
    positions = () if dataloader_idx is None else (dataloader_idx,)
    batches, transfer = _open_loader(evaluation, loader, limit)
    weight, alike = _weight(run, loader), lockstep or even(loader)

    # A signal may have come while the loader was prepared.
    agreement.begin()
    if agreement.interrupted:
        end_on_signal(run)

    taken = batches if limit == float("inf") else itertools.islice(batches, int(limit))
    for batch_idx, batch in enumerate(taken):
        for share in _shares(run, batch, batch_idx, index, buffers):
            if transfer is not None:
                share = transfer(share, index)
            if weight is not None and weight(batch_idx) == 0.0:
                if lockstep:
                    with counting_nothing(module, log):
                        step.evaluate(name, share, batch_idx, dataloader_idx)
                continue
            log.batch = share
            for hook in batch_start:
                hook(share, batch_idx, *positions)
            output = step.evaluate(name, share, batch_idx, dataloader_idx)
            for hook in batch_end:
                hook(output, share, batch_idx, *positions)
            if sink is not None:
                sink(output, batch_idx, index)

        # Restarts count steps of training alone as progress, but a long evaluation is no stall.
        answering.progressed()

        # Ranks with equal numbers of batches agree on a signal. A single process ends at once.
        if alike and run.group.is_distributed:
            agreement.step()
        if agreement.interrupted and (alike or not run.group.is_distributed):
            end_on_signal(run)
    close(batches)


def _open_loader(
    evaluation: _Pass, loader: Any, limit: float
) -> tuple[Iterator[Any], Callable[[Any, int], Any] | None]:
    """Begin to read a loader.

    Returns:
        Its batches, and the function that brings each to the device, or None.
    """
    run, stage = evaluation.run, evaluation.stage
    ahead = read_ahead(run, loader, HOOKS[stage])
    transfer = run.transfer(moved=ahead is not None)
    tell_samplers(loader, run.progress.epoch)
    check_order(run, loader)
    batches = batches_of(loader, ahead, limit)

    # In lockstep, the ranks end together, when the first of them has no batch left.
    if run.parallel.lockstep and not even(loader):
        batches = together(batches, run.group, stage)
    batches = same_rows(run, batches)
    if evaluation.profile is not None:
        batches = profiled_batches(batches, evaluation.profile, f"[_EvaluationLoop].{LOADERS[stage]}_next")
    return batches, transfer


def _end_epoch(run: Run, name: str, log: MetricLog) -> Values:
    """Reduce the metrics of a pass, and call the hooks that end it. They see the values, and may log further values."""
    log.batch = log.dataloader_idx = None
    values = log.epoch_values()
    run.reports.callback.update(values.callback)
    run.hooks.call(f"on_{name}_epoch_end")
    values.update(log.epoch_values())
    run.reports.callback.update(values.callback)
    for hook in run.hooks.get(f"on_{name}_end"):
        hook()
    log.reset_metrics()
    return values


def _weight(run: Run, loader: Any) -> Callable[[int], float] | None:
    """Return the function from a batch's index to the weight of this rank's share, or of the running logical rank's."""
    logical = run.logical
    if logical is None or not isinstance(loader, LogicalLoader):
        return weigher(loader, run.data_world)
    return lambda batch_idx: loader.weight(logical.position or 0, batch_idx)


def _shares(run: Run, batch: Any, batch_idx: int, loader_idx: int, buffers: OwnBuffers | None) -> Iterator[Any]:
    """Yield the batch of each logical rank of this process, while this rank draws and logs; or the only batch."""
    logical, log = run.logical, run.metrics
    if logical is None or buffers is None or not isinstance(batch, LogicalBatch):
        yield batch
        return
    number = rng.mix(run.progress.batches, loader_idx, batch_idx)
    for position, share in enumerate(batch):
        logical.enter(run, position, EVALUATION, number)
        log.enter(position)
        buffers.enter(position)
        yield share
    logical.enter(run, None, EVALUATION, number)
    log.enter(None)


def by_loader(values: Values, loaders: int) -> list[dict[str, float]]:
    """Return one dict of metrics for each loader. Values that belong to no loader are in all of them."""
    return [
        {name: value for name, value in values.results.items() if index in values.loaders.get(name, (index,))}
        for index in range(loaders)
    ]


@contextlib.contextmanager
def evaluation_mode(module: Any, name: str) -> Iterator[None]:
    """Put every submodule into evaluation mode for a `with` block, and back into its own mode afterwards."""
    modes = {part: part.training for part in module.modules()}
    getattr(module, f"on_{name}_model_eval", module.eval)()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
        restored = getattr(module, f"on_{name}_model_train", None)
        if restored is not None and overrides(module, f"on_{name}_model_train"):
            restored()


@contextlib.contextmanager
def counting_nothing(module: Any, log: MetricLog) -> Iterator[None]:
    """Let a batch leave no trace in the logged values and in the module's torchmetrics objects, for a `with` block."""
    metrics = [part for part in module.modules() if hasattr(part, "_update_count") and hasattr(part, "_defaults")]
    kept = [{key: _copied(getattr(part, key)) for key in (*part._defaults, "_update_count")} for part in metrics]
    log.counts = False
    try:
        yield
    finally:
        log.counts = True
        for part, values in zip(metrics, kept, strict=True):
            for key, value in values.items():
                setattr(part, key, value)


def _copied(value: Any) -> Any:
    """Return a copy of a state of a torchmetrics object, which an update may change in place."""
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def gradients_off(inference_mode: bool) -> contextlib.AbstractContextManager[Any]:
    """Return `torch.inference_mode`, or `torch.no_grad` if a graph needs the tensors later, as with FSDP's parameters."""
    return torch.inference_mode() if inference_mode else torch.no_grad()
