"""The callback that compares the state of a training with the hashes in the checkpoints of an earlier one.

A checkpoint is made at one of several moments after a batch: after the callbacks, a validation, or the end of the epoch.
Schedulers may step between these moments. So the state is compared at each of them, until it is the checkpoint's. If it
never is before the next batch, it differs, and training ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from footplate.callbacks import Callback
from footplate.checkpoint.format.shards import cut_out, file_name
from footplate.checkpoint.format.state_hash import combined, is_hashed, state_hash
from footplate.checkpoint.format.statefile import Snapshot
from footplate.replaying.retraining import Retraining, end_here
from footplate.training.saving import collect_state


@dataclass
class Target:
    """A checkpoint to compare with.

    Attributes:
        batches: the trained batches before it.
        state_hash: the hash of its state.
        sharded: each rank has written its own shards.
        same: True or False once it was compared.
        checksums: if the state differs: the checksum of each tensor of the retrained state.
    """

    batches: int
    state_hash: str
    sharded: bool
    same: bool | None = None
    checksums: dict[str, int] = field(default_factory=dict)


class StateComparer(Callback):
    """Compares the state at each of some checkpoints, and ends training after the last one, or the first that differs.

    Args:
        targets: the checkpoints, by their batches.
    """

    # As late as the callbacks that save.
    order = 2
    saves_nothing = True

    def __init__(self, targets: list[Target]) -> None:
        self.targets = targets

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.compare(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.compare(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.compare(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.compare(trainer, last_time=True)

    def compare(self, trainer: Any, last_time: bool = False) -> None:
        """Compare the state with the checkpoints of this batch.

        Args:
            trainer: the trainer.
            last_time: the state doesn't change any more before the next batch.
        """
        if not trainer.training_in_progress:
            return
        due = [target for target in self.targets if target.same is None and target.batches == trainer.progress.batches]
        if not due:
            return

        for target in due:
            value, checksums = _hash_of(trainer, target.sharded)
            same = trainer.group.from_first(value == target.state_hash)
            if same or last_time:
                target.same = same
                target.checksums = {} if same else checksums
        differs = any(target.same is False for target in self.targets)
        if differs or all(target.same is not None for target in self.targets):
            end_here(trainer)


class BeforeBatch(Retraining):
    """Compares once more before the next batch. Late callbacks aren't called then.

    Args:
        initial: see `Retraining`.
        comparer: the callback that compares.
    """

    def __init__(self, initial: str, comparer: StateComparer) -> None:
        super().__init__(initial)
        self._comparer = comparer

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._comparer.compare(trainer, last_time=True)


def _hash_of(trainer: Any, sharded: bool) -> tuple[str, dict[str, int]]:
    """Return the hash of the state as a checkpoint has it, and the checksums, on rank 0. All ranks call this."""
    state = collect_state(trainer.run, weights_only=False, whole=not sharded)
    of_ranks: list[tuple[str, dict[str, int]]] = []
    if sharded:
        state, shards = cut_out(state)
        part = Snapshot().take(shards.parts)
        of_ranks = trainer.group.gather_to_first((state_hash(part.tree, part.checksums()), part.checksums()))
    if trainer.world.rank != 0:
        return "", {}

    whole = Snapshot().take(state)
    own = whole.checksums()
    hashes, checksums = [state_hash(whole.tree, own)], {name: own[name] for name in own if is_hashed(name)}
    for rank, (of_rank, parts) in enumerate(of_ranks):
        hashes.append(of_rank)
        checksums |= {f"{name} of {file_name(rank)}": parts[name] for name in parts if is_hashed(name)}
    return combined(hashes), checksums
