"""Calls of `validate`, `test` and `predict`, from the checkpoint to the pass over the loaders.

    checkpoint read  →  on_load_checkpoint  →  loaders  →  module and its weights  →  step  →  one pass over the loaders

`training/evaluation.py` makes the pass. Validation inside a `fit` uses it too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from footplate.checkpoint.frozen_weights import fill_in
from footplate.checkpoint.run_state import RunState
from footplate.checkpoint.storage import Place
from footplate.core.errors import ConfigError
from footplate.hardware.transfer import to_device
from footplate.tracking.silent import Silent
from footplate.training.call_scope import call_setup
from footplate.training.evaluation import by_loader, evaluate
from footplate.training.fitting import settings_to_log
from footplate.training.loaders import LOADERS, check_evaluated, evaluation_loaders, no_data
from footplate.training.lock import only_writer
from footplate.training.logical_checks import check_module
from footplate.training.rank_checks import check_data, read_alike
from footplate.training.resuming import call_load_hooks, find_on_all, load_state, or_best
from footplate.training.step_setup import build_step, prepare_module

if TYPE_CHECKING:
    from footplate.training.run import Run

log = logging.getLogger(__name__)


def judge(
    run: Run, held: contextlib.ExitStack, dataloaders: Any, ckpt_path: str | Place | None, is_new: bool
) -> list[dict[str, float]]:
    """Validate or test; see `Trainer.validate`.

    Args:
        run: the run of this call.
        held: closed when the loggers have been closed.
        dataloaders: as the user passed them.
        ckpt_path: as the user passed it.
        is_new: True if the call was given a module. Then no earlier checkpoint is its best.

    Returns:
        One dict of metrics for each loader. An empty list if a limit of 0 leaves no batch.
    """
    loaders, limits = _prepare(run, dataloaders, ckpt_path, is_new)
    # A limit of 0 evaluates nothing.
    if not any(limits):
        return []
    run.reports.forget()
    _append_to_records(run, held)
    values = evaluate(run, str(run.stage), loaders, limits)
    run.reports.publish(values)
    run.reports.send(run.progress.global_step, run.progress.epoch)
    return by_loader(values, len(loaders))


def show(run: Run, results: list[dict[str, float]]) -> None:
    """Print the results of `judge`."""
    for index, result in enumerate(results):
        where = f" (loader {index})" if len(results) > 1 else ""
        run.print(f"{run.stage}{where}: " + "  ".join(f"{name} {value:.6g}" for name, value in result.items()))


def predict(
    run: Run, dataloaders: Any, ckpt_path: str | Place | None, is_new: bool, keep: bool, output: str | Path | None
) -> Any:
    """Predict; see `Trainer.predict`.

    Args:
        run: the run of this call.
        dataloaders: as the user passed them.
        ckpt_path: as the user passed it.
        is_new: see `judge`.
        keep: return the predictions.
        output: write them as a table into this directory.
    """
    from footplate.training.predictions import PredictionWriter

    loaders, limits = _prepare(run, dataloaders, ckpt_path, is_new)
    # A limit of 0 predicts nothing.
    if not any(limits):
        return []
    run.reports.forget()
    predictions: list[list[Any]] = [[] for _ in loaders]
    writer = None
    if output is not None:
        # The first of the ranks that read the same rows writes.
        writes = run.world.rank % run.ranks_of_a_share == 0
        share = run.data_world.rank if writes else None
        writer = PredictionWriter(run.group.from_first(run.placement.for_all(Path(output))), run.group, share)

    def sink(prediction: Any, batch_idx: int, index: int) -> None:
        # A GPU has no room for the predictions of all batches, and a CUDA graph overwrites those of the batch before.
        prediction = to_device(prediction, torch.device("cpu"))
        if keep:
            predictions[index].append(prediction)
        if writer is not None:
            writer.write(prediction)

    with contextlib.nullcontext() if writer is None else writer:
        evaluate(run, "predict", loaders, limits, sink)
    if keep:
        return predictions[0] if len(predictions) == 1 else predictions
    return None if writer is None else writer.table()


def _prepare(run: Run, dataloaders: Any, ckpt_path: str | Place | None, is_new: bool) -> tuple[list[Any], list[float]]:
    """Return the loaders of an evaluation and the number of batches of each. Set up the run's module and step."""
    stage = str(run.stage)
    call_setup(run)
    if run.logical is not None:
        check_module(run)
        run.logical.use_threads(run, None)
    path = find_on_all(run, or_best(run, ckpt_path, is_new))
    check_evaluated(run, stage, dataloaders)
    state = None if path is None else read_alike(run, path, functools.partial(load_state, run))
    if state is not None:
        call_load_hooks(run, state)
    loaders, limits = evaluation_loaders(run, stage, dataloaders, run.config.limit(stage))
    if not loaders:
        raise no_data(stage)
    setattr(run, f"num_{LOADERS[stage]}_batches", limits)
    check_data(run, {stage: list(zip(loaders, limits, strict=True))})
    prepare_module(run)
    if state is not None:
        state = run.parallel.weight_parts(state, run.module)
        state = fill_in(state, run.module, str(path), run.parallel.whole)
        RunState(run.module, run.seed).load_module(state, str(path))
    build_step(run)
    return loaders, limits


def _append_to_records(run: Run, held: contextlib.ExitStack) -> None:
    """Add the results of an evaluation to the run's record, unless another process writes it."""
    if all(isinstance(logger, Silent) for logger in run.recorders):
        return
    try:
        held.enter_context(only_writer(run.run_dir, patience_s=0.0))
    except ConfigError as error:
        log.warning("The results are not logged: %s", error)
        return
    for logger in run.recorders:
        logger.append(run.run_dir, settings_to_log(run))
