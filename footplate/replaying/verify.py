"""Verification: a stretch of a run trained again, and its states compared with the checkpoints of the run.

    fp.verify("runs/flowers", first=1000, last=5000)

Each checkpoint has a hash of the state that training continues with (`footplate.checkpoint.format.state_hash`). A resumed
run repeats the original one bit for bit. So if the hash of a later checkpoint differs, something went wrong between it and
the checkpoint before: on the machine of the run, or on this one. A flipped bit of memory, a faulty device, a program that
draws random numbers from a source of its own, or another version of a library: each shows as a difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from footplate.checkpoint.storage import Place
from footplate.core.errors import ConfigError
from footplate.replaying.recorded_run import Saved, saved_in
from footplate.replaying.retraining import rebuilt
from footplate.replaying.state_comparer import BeforeBatch, StateComparer, Target
from footplate.training.trainer import Trainer


@dataclass(frozen=True)
class Compared:
    """A checkpoint whose state was compared.

    Attributes:
        path: its path.
        step: the optimizer steps before it.
        same: the retrained state has the same hash.
        differing: the tensors that differ. Empty if only plain values do, such as a learning rate.
    """

    path: str
    step: int
    same: bool
    differing: list[str]


@dataclass(frozen=True)
class Verification:
    """The result of a verification.

    Attributes:
        checkpoint: the checkpoint that training began from, whose state counts as right; None for the beginning of the run.
        first_step: the number of steps before the first one that was trained again.
        compared: the checkpoints, in the order of their steps, up to the first that differs.
        skipped: checkpoints after a difference, which were not compared.
    """

    checkpoint: str | None
    first_step: int
    compared: list[Compared]
    skipped: list[str]

    @property
    def difference(self) -> Compared | None:
        """The first checkpoint that differs; None if all are the same."""
        return next((checkpoint for checkpoint in self.compared if not checkpoint.same), None)

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last step among those in which the difference arose; None if there is none."""
        if self.difference is None:
            return None
        before = [checkpoint.step for checkpoint in self.compared if checkpoint.same]
        return (before[-1] if before else self.first_step) + 1, self.difference.step


def verify(
    run: str | Place,
    first: int | None = None,
    last: int | None = None,
    trainer: Trainer | None = None,
    model: Any = None,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: Any = None,
) -> Verification:
    """Train a stretch of a run again, and compare the state at each of its checkpoints.

    Args:
        run: the run's directory.
        first: begin from the newest checkpoint at or before this step, or from the beginning of the run; by default from
            the oldest checkpoint, or from the beginning if the run has only one.
        last: compare the checkpoints up to this step; by default all.
        trainer: see `replay`; the others likewise.
        model: see `replay`.
        train_dataloaders: see `replay`.
        val_dataloaders: see `replay`.
        datamodule: see `replay`.

    Raises:
        CheckpointError: the run has no checkpoint, or it belongs to another model or other data.
        ConfigError: there is nothing to compare, or the run can't be rebuilt.

    Examples:
        >>> data = fp.TableDataModule(train="flowers.parquet", batch_size=4, seed=1)
        >>> verification = fp.verify("runs/flowers", trainer=fp.Trainer(max_epochs=2), model=new_model(), datamodule=data)
        >>> verification.difference is None
        True
    """
    saved = sorted(saved_in(run), key=lambda checkpoint: (checkpoint.global_step, checkpoint.meta["batches"]))
    start, after = _stretch(saved, first, last, str(run))
    targets = [
        Target(checkpoint.meta["batches"], checkpoint.meta["state_hash"], len(checkpoint.meta["files"]) > 1)
        for checkpoint in after
    ]
    newest = max(saved, key=lambda checkpoint: checkpoint.meta["created"]).outline()

    comparer = StateComparer(targets)
    before_batch = BeforeBatch(newest.get("steps", {}).get("initial", ""), comparer)
    with rebuilt(run, newest, trainer, model, train_dataloaders, val_dataloaders, datamodule) as program:
        again = program.train([before_batch, comparer], start, newest["seed"])

    compared, skipped = [], []
    for checkpoint, target in zip(after, comparer.targets, strict=True):
        if target.same is None:
            skipped.append(str(checkpoint.path))
        else:
            differing = [] if target.same else _differing(checkpoint.checksums(), target.checksums)
            compared.append(Compared(str(checkpoint.path), checkpoint.global_step, target.same, differing))
    if not compared or (skipped and all(checkpoint.same for checkpoint in compared)):
        raise ConfigError(
            f"{run}: training ended at step {again.global_step}, before {skipped[0]}. Use the trainer's arguments of the "
            "run."
        )
    return Verification(
        None if start is None else str(start.path), start.global_step if start else 0, compared, skipped
    )


def _stretch(saved: list[Saved], first: int | None, last: int | None, run: str) -> tuple[Saved | None, list[Saved]]:
    """Return the checkpoint to begin from, and the checkpoints to compare.

    Raises:
        ConfigError: there is none to compare, or none of them has a hash.
    """
    for name, value in (("first", first), ("last", last)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ConfigError(f"{name}={value!r}: expected a step, an integer of at least 0.")
    if first is not None and last is not None and last <= first:
        raise ConfigError(f"first={first}, last={last}: expected a later step as the last one.")

    if first is None:
        start = saved[0] if len(saved) > 1 else None
    else:
        start = next((checkpoint for checkpoint in reversed(saved) if checkpoint.global_step <= first), None)
    begun = -1 if start is None else start.meta["batches"]
    after = [
        checkpoint
        for checkpoint in saved
        if checkpoint.meta["batches"] > begun and (last is None or checkpoint.global_step <= last)
    ]
    if not after:
        steps = ", ".join(str(checkpoint.global_step) for checkpoint in saved)
        raise ConfigError(
            f"{run}: there is no checkpoint to compare in this stretch. The run has those of the steps {steps}."
        )
    hashed = [checkpoint for checkpoint in after if checkpoint.meta.get("state_hash")]
    if not hashed:
        raise ConfigError(
            f"{run}: its checkpoints have no hash of their state, since an earlier version of Footplate wrote them."
        )
    return start, hashed


def _differing(saved: dict[str, int], retrained: dict[str, int]) -> list[str]:
    """Return the names of tensors with different checksums, or in one of the states only."""
    return [name for name in {**saved, **retrained} if saved.get(name) != retrained.get(name)]
