"""A finished or interrupted run, as its checkpoints record it: which there are, and the history of its steps.

A run is named by its directory, or by one of its checkpoints. The newest complete checkpoint holds the history of all steps
that led to it (`footplate.checkpoint.step_history`). Only the header of its file is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from footplate import checkpoint
from footplate.checkpoint.format import statefile
from footplate.checkpoint.format.state_hash import is_hashed
from footplate.checkpoint.run_state import Progress
from footplate.checkpoint.step_history import StepBatches, StepHistory
from footplate.checkpoint.storage import Place, store_of, to_place
from footplate.core.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint from which training can continue.

    Attributes:
        path: its path.
        meta: its marker.
    """

    path: Place
    meta: dict[str, Any]

    @property
    def global_step(self) -> int:
        """Optimizer steps before it."""
        return int(self.meta["global_step"])

    def outline(self) -> dict[str, Any]:
        """The state without its tensors."""
        return self._header(checkpoint.STATE).tree

    def checksums(self) -> dict[str, int]:
        """The checksum of each tensor of the state that is hashed. A shard's name ends with that of its file."""
        checksums = {}
        for name in self.meta["files"]:
            suffix = "" if name == checkpoint.STATE else f" of {name}"
            for tensor, checksum in self._header(name).checksums.items():
                if is_hashed(tensor):
                    checksums[tensor + suffix] = checksum
        return checksums

    def _header(self, name: str) -> statefile.Outline:
        with store_of(self.path).open(self.path, name) as file:
            return statefile.outline(file, self.meta["files"][name]["bytes"], str(self.path))


def saved_in(run: str | Place) -> list[Saved]:
    """List the checkpoints of a run from which training can continue, the newest last.

    Args:
        run: the run's directory, or one checkpoint; a path or a URI.

    Raises:
        CheckpointError: there is none.
    """
    place = to_place(run)
    store = store_of(place)
    if store.kind(place) is None:
        raise CheckpointError(f"There is nothing at {place}. Give the directory of a run, or a checkpoint.")

    checkpoints = []
    for path in [store.resolve(place)] if is_checkpoint(place) else store.find(place):
        meta, fault = checkpoint.examine(path)
        if not fault and not meta.get("weights_only"):
            checkpoints.append(Saved(path, meta))
    if not checkpoints:
        raise CheckpointError(
            f"{place} has no complete checkpoint from which training can continue. `footplate checkpoint inspect {place}` "
            "shows what it has."
        )
    return sorted(checkpoints, key=lambda saved: saved.meta["created"])


def is_checkpoint(run: str | Place) -> bool:
    """Return True for the path of a checkpoint; False for a directory of a run."""
    place = to_place(run)
    store = store_of(place)
    return place.name.endswith(checkpoint.SUFFIX) or store.read_marker(store.resolve(place)) is not None


def batches_of(saved: Saved, step: int) -> StepBatches:
    """Return the batches of a step, from the history in a checkpoint.

    Raises:
        ConfigError: the history doesn't know the step.
    """
    tree = saved.outline()
    history, progress = StepHistory(), Progress(**tree["progress"])
    history.load_state_dict(tree.get("steps", {}))
    try:
        return history.find(step, progress.position)
    except ConfigError as error:
        raise ConfigError(f"{saved.path}: {error}") from None


def check_step(step: int) -> None:
    """Raise if a number can't be a step.

    Raises:
        ConfigError: it isn't an integer of at least 1.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ConfigError(f"step={step!r}: expected an integer of at least 1. The first optimizer step is step 1.")
