"""A call of a trainer, from the user's arguments to the run that does the work.

changes since the last call  →  a compiled model unwrapped  →  searches that callbacks ask for
→  in processes of its own, if there are several devices   or   in a `Run`, here
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.step.torch_compile import unwrapped
from footplate.training import evaluation_calls, fitting, job
from footplate.training.call_scope import called
from footplate.training.changes import take_changes, take_ckpt_path
from footplate.training.lock import only_writer
from footplate.training.preemption import watching
from footplate.training.prepare import default_max_epochs, run_searches, split_datamodule
from footplate.training.resuming import or_best
from footplate.training.run import Run, Stage

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer

CheckpointPath = str | Path | None


@dataclass(frozen=True)
class Call:
    """The arguments of a call, in one form.

    Attributes:
        stage: which call.
        passed_model: the model as the user passed it. It may be compiled.
        model: the module in it. None for the one that was run last.
        loaders: as the user passed them.
        datamodule: the data module. None without one.
        ckpt_path: the checkpoint to begin with.
        ends_after_search: a callback has asked for a search, and for nothing else.
    """

    stage: Stage
    passed_model: Any
    model: Any
    loaders: Any
    datamodule: Any
    ckpt_path: Any
    ends_after_search: bool

    @property
    def is_new(self) -> bool:
        """True if the user passed a model."""
        return self.model is not None


def _begin(
    trainer: Trainer, stage: Stage, model: Any, loaders: Any, datamodule: Any, ckpt_path: CheckpointPath
) -> Call:
    take_changes(trainer)
    ckpt_path = take_ckpt_path(trainer, ckpt_path)
    if stage == "fit" and trainer.max_epochs is None:
        trainer.max_epochs = default_max_epochs(trainer.max_steps, trainer.callbacks)
    module = unwrapped(model, trainer.run.accelerator, trainer.run.parallel)
    loaders, datamodule = split_datamodule(loaders, datamodule)
    ends = run_searches(trainer, stage, trainer.module if module is None else module, loaders, datamodule)
    return Call(stage, model, module, loaders, datamodule, ckpt_path, ends)


def _next_run(trainer: Trainer, call: Call) -> Run:
    trainer.run = trainer.run.next(call.stage, call.model if call.is_new else trainer.module, call.datamodule)
    return trainer.run


def _in_ranks(trainer: Trainer, call: Call, **arguments: Any) -> Any:
    """Make a call in processes of its own, one for each device."""
    from footplate.training.worker_calls import in_ranks

    module = trainer.module if call.passed_model is None else call.passed_model
    return in_ranks(trainer, call.stage, module, datamodule=call.datamodule, **arguments)


def fit(
    trainer: Trainer, model: Any, loaders: Any, val_loaders: Any, datamodule: Any, ckpt_path: CheckpointPath
) -> None:
    """Train; see `Trainer.fit`."""
    call = _begin(trainer, "fit", model, loaders, datamodule, ckpt_path)
    if call.ends_after_search:
        return
    if trainer.run.launch_id is None:
        trainer.run.job_fit, trainer.run.origin = job.next_fit()
    if trainer.run.placement.starts_ranks:
        _in_ranks(
            trainer, call, train_dataloaders=call.loaders, val_dataloaders=val_loaders, ckpt_path=call.ckpt_path
        )  # fmt: skip
        return

    run = _next_run(trainer, call)
    with contextlib.ExitStack() as held, called(run):
        if not run.config.fast_dev_run:
            run.group.ask_first(lambda: held.enter_context(only_writer(run.run_dir)))
        held.enter_context(watching(run.signals.terminate))
        fitting.fit(run, call.loaders, val_loaders, call.ckpt_path)


def evaluate(
    trainer: Trainer, stage: Stage, model: Any, loaders: Any, ckpt_path: CheckpointPath, verbose: bool, datamodule: Any
) -> list[dict[str, float]]:
    """Validate or test; see `Trainer.validate`."""
    call = _begin(trainer, stage, model, loaders, datamodule, ckpt_path)
    if call.ends_after_search:
        return []
    if trainer.run.placement.starts_ranks:
        best = or_best(trainer.run, call.ckpt_path, call.is_new)
        return _in_ranks(trainer, call, dataloaders=call.loaders, ckpt_path=best, verbose=verbose)

    run = _next_run(trainer, call)
    with contextlib.ExitStack() as held, called(run):
        results = evaluation_calls.judge(run, held, call.loaders, call.ckpt_path, call.is_new)
    if verbose:
        evaluation_calls.show(run, results)
    return results


def predict(
    trainer: Trainer,
    model: Any,
    loaders: Any,
    datamodule: Any,
    keep: bool,
    ckpt_path: CheckpointPath,
    output: str | Path | None,
) -> Any:
    """Predict; see `Trainer.predict`."""
    call = _begin(trainer, "predict", model, loaders, datamodule, ckpt_path)
    if call.ends_after_search:
        return None
    if trainer.run.placement.starts_ranks:
        best = or_best(trainer.run, call.ckpt_path, call.is_new)
        return _in_ranks(
            trainer, call, dataloaders=call.loaders, return_predictions=keep, ckpt_path=best, output=output
        )  # fmt: skip

    run = _next_run(trainer, call)
    with called(run):
        return evaluation_calls.predict(run, call.loaders, call.ckpt_path, call.is_new, keep, output)
