"""A step of a run trained again, bit for bit: its batch, its loss and its gradients.

    fp.replay("runs/flowers", step=12345)                               a run of `footplate fit`, which can be rebuilt
    fp.replay("runs/flowers", 12345, trainer, Net(), loader)            in a script, with what the script passes to `fit`

The order of events:

1. The newest checkpoint before the step is found. Without one, training begins with new weights, under the run's seed.
2. A trainer with the same arguments trains from there, in a temporary directory. Loggers are silent, and nothing is saved.
   A resumed run repeats an uninterrupted one bit for bit, so it reaches the step in the same state.
3. `StepRecorder` copies the step, and training ends after it.
4. The module, the optimizers and the generators get the state back that they had before the step. So
   `model.training_step(batch, batch_idx)` gives the same loss once more.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from footplate.checkpoint.storage import Place
from footplate.core import rng
from footplate.core.errors import ConfigError
from footplate.replaying.recorded_run import Saved, batches_of, check_step, is_checkpoint, saved_in
from footplate.replaying.retraining import ranks_of, rebuilt
from footplate.replaying.step_recorder import StepRecorder
from footplate.step.torch_internals import inside
from footplate.training.trainer import Trainer


@dataclass(frozen=True)
class Replay:
    """A step that was trained again. All tensors are copies on the CPU.

    Attributes:
        step: the optimizer step, from 1.
        epoch: its epoch, from 0.
        batch_indices: the indices of its batches in the epoch; several with accumulated gradients.
        batches: for each rank, its batches, as the hook `on_train_batch_start` gets them.
        losses: for each rank, the losses of these batches; None for a batch that `training_step` skipped.
        gradients: by the name of a parameter, as the hook `on_before_optimizer_step` gets them: accumulated, averaged over
            the ranks, without the loss scale, before clipping.
        weights: the module's state before the step.
        optimizer_states: the states of the optimizers before the step.
        checkpoint: the checkpoint that training began from; None for the beginning of the run.
        first_step: the number of steps before the first one that was trained again.
        begins_inside: the checkpoint was made between two batches of the step, so that only its later batches are here.
            The gradients are those of all its batches.
        model: the module.
    """

    step: int
    epoch: int
    batch_indices: list[int]
    batches: list[list[Any]]
    losses: list[list[torch.Tensor | None]]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, Any]
    optimizer_states: list[dict[str, Any]]
    checkpoint: str | None
    first_step: int
    begins_inside: bool
    model: Any

    @property
    def batch(self) -> Any:
        """The first batch of rank 0."""
        return self.batches[0][0]

    @property
    def loss(self) -> torch.Tensor | None:
        """The loss of the first batch of rank 0."""
        return self.losses[0][0]


def replay(
    run: str | Place,
    step: int,
    trainer: Trainer | None = None,
    model: Any = None,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: Any = None,
    debug: bool = False,
) -> Replay:
    """Train a step of a run again, from the newest checkpoint before it.

    A run of `footplate fit` is rebuilt from the `config.yaml` in its directory. For a run of a script, pass what the script
    passes to `Trainer.fit`, made in the same way, and not trained yet. Nothing is written to the run's directory. The model
    has the weights from before the step afterwards.

    Args:
        run: the run's directory, or the checkpoint to begin from; a path or a URI.
        step: the optimizer step, from 1, as in `trainer.global_step` after it and in the names of checkpoints.
        trainer: a trainer with the arguments of the run.
        model: see `Trainer.fit`.
        train_dataloaders: see `Trainer.fit`.
        val_dataloaders: see `Trainer.fit`.
        datamodule: see `Trainer.fit`.
        debug: enter pdb at the beginning of `training_step`, for each batch of the step.

    Raises:
        CheckpointError: the run has no checkpoint, or it belongs to another model or other data.
        ConfigError: training doesn't reach the step, the run can't be rebuilt, or its gradients can't be seen.

    Examples:
        >>> data = fp.TableDataModule(train="flowers.parquet", batch_size=4, seed=1)
        >>> again = fp.replay("runs/flowers", step=4, trainer=fp.Trainer(max_epochs=2), model=new_model(), datamodule=data)
        >>> again.batch["label"].shape
        torch.Size([4])
    """
    check_step(step)
    saved = saved_in(run)
    if is_checkpoint(run) and saved[0].global_step >= step:
        raise ConfigError(
            f"step {step}: {run} was saved after step {saved[0].global_step}. Give an earlier checkpoint, or the directory "
            "of the run."
        )
    newest = saved[-1].outline()
    start = _nearest(saved, step)
    recorder = StepRecorder(step, newest.get("steps", {}).get("initial", ""))
    with rebuilt(run, newest, trainer, model, train_dataloaders, val_dataloaders, datamodule) as program:

        def check(again: Trainer) -> None:
            _check_trainer(again, _ranks_of(saved[-1], step), debug)

        module = inside(program.model)
        with _stopping_in(module, recorder) if debug else contextlib.nullcontext():
            again = program.train([recorder], start, newest["seed"], check)

    if not recorder.done or recorder.first_step is None:
        raise ConfigError(f"step {step}: training ended at step {again.global_step}, before it.")
    _put_back(again, module, recorder)
    return Replay(
        step=step,
        epoch=recorder.epoch,
        batch_indices=recorder.batch_indices,
        batches=recorder.batches,
        losses=recorder.losses,
        gradients=recorder.gradients,
        weights=recorder.weights,
        optimizer_states=recorder.optimizer_states,
        checkpoint=None if start is None else str(start.path),
        first_step=recorder.first_step,
        begins_inside=recorder.begins_inside,
        model=module,
    )


def _nearest(saved: list[Saved], step: int) -> Saved | None:
    """Return the newest checkpoint before a step, if possible one that isn't between two batches of the step."""
    before = [checkpoint for checkpoint in saved if checkpoint.global_step < step]
    before.sort(key=lambda checkpoint: (checkpoint.global_step, checkpoint.meta["batches"]), reverse=True)
    between = (
        checkpoint
        for checkpoint in before
        if checkpoint.global_step < step - 1 or not checkpoint.outline()["step"].get("accumulated")
    )
    return next(between, before[0] if before else None)


def _ranks_of(newest: Saved, step: int) -> int | None:
    """Return the number of ranks that made a step; None if it isn't known."""
    try:
        return batches_of(newest, step).ranks
    except ConfigError:
        return None


def _check_trainer(trainer: Trainer, ranks: int | None, debug: bool) -> None:
    asked = ranks_of(trainer)
    if trainer.accelerator.owns_weights:
        raise ConfigError(
            f'accelerator="{trainer.accelerator.name}": a step can\'t be replayed there, since its gradients exist only '
            "inside the compiled program. `footplate rows` names its rows."
        )
    if trainer.config.logical_ranks is not None:
        raise ConfigError(
            f"logical_ranks={trainer.config.logical_ranks}: a step of logical ranks can't be replayed, since a "
            "process makes several batches in it. `footplate rows` names its rows."
        )
    if ranks is not None and ranks != asked:
        raise ConfigError(
            f"The step was made by {ranks} ranks, and this trainer has {asked}, so the sums would be rounded "
            f"in another way. Use devices={ranks}."
        )
    if debug and asked > 1:
        raise ConfigError(
            f"A step of {asked} ranks can't be debugged: the ranks are processes without a terminal. Replay it without the "
            "debugger."
        )


@contextlib.contextmanager
def _stopping_in(module: Any, recorder: StepRecorder) -> Iterator[None]:
    """Let the debugger stop in `training_step` of a module, for a `with` block."""
    training_step = module.training_step

    @functools.wraps(training_step)
    def debugged(*arguments: Any) -> Any:
        return recorder.under_debugger(training_step, *arguments)

    module.training_step = debugged
    try:
        yield
    finally:
        del module.training_step


def _put_back(trainer: Trainer, module: Any, recorder: StepRecorder) -> None:
    """Give the module, the optimizers and the generators the state before the step."""
    module.load_state_dict(recorder.weights)
    for optimizer, state in zip(trainer.optimizers, recorder.optimizer_states, strict=False):
        optimizer.load_state_dict(state)
    rng.restore(recorder.generators, trainer.device)
