"""A combination of training loaders that resumes: each loader continues at its own position.

The state has each loader's pass of the epoch (`max_size_cycle` makes several) and its batch in it. Pass k of epoch e
has the order of epoch `e + k * 2**20`. So it is shuffled differently, and depends on nothing that was drawn before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from footplate.core.errors import CheckpointError
from footplate.data.adapters.combination import Build, Combination, LoaderPosition, Mode
from footplate.data.order.plan import epoch_of_pass


class TrainingCombination(Combination):
    """A combination that keeps its position in an epoch, and continues there.

    Args:
        parts: the loaders, each made resumable.
        build: see `Combination`.
        mode: see `CombinedLoader`.
    """

    def __init__(self, parts: list[Any], build: Build, mode: Mode) -> None:
        super().__init__(parts, build, mode)
        self._epoch = 0
        self._restored = False

    def __iter__(self) -> Iterator[Any]:
        if not self._restored:
            self._batch, self._positions = 0, [LoaderPosition() for _ in self.parts]
        self._restored = False
        return self._iterate()

    @property
    def skipped(self) -> int:
        """The number of rows that were left out because they could not be read."""
        return sum(getattr(part, "skipped", 0) for part in self.parts)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch. It begins with its first batch, unless it is the epoch that was restored."""
        if epoch != self._epoch or not self._restored:
            self._epoch, self._batch, self._positions = epoch, 0, [LoaderPosition() for _ in self.parts]
            self._restored = False
        for part, position in zip(self.parts, self._positions, strict=True):
            part.set_epoch(epoch_of_pass(epoch, position.passes))

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many of its batches have been handed out, and the position and state of each loader."""
        parts = [
            {**asdict(position), "state": part.state_dict()}
            for position, part in zip(self._positions, self.parts, strict=True)
        ]
        return {"epoch": self._epoch, "batch": self._batch, "mode": self.mode, "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after those batches.

        Raises:
            CheckpointError: the state is of another combination.
        """
        saved_parts = state.get("parts", [])
        if len(saved_parts) != len(self.parts) or state.get("mode") != self.mode:
            raise CheckpointError(
                f"The checkpoint was made with {len(saved_parts) or 'no'} combined loader(s) "
                f"(mode={state.get('mode')}), this run has {len(self.parts)} (mode={self.mode}). Use the same to resume."
            )
        self._epoch, self._batch, self._restored = state["epoch"], state["batch"], True
        self._positions = [
            LoaderPosition(*(saved[name] for name in ("passes", "batch", "before", "ended"))) for saved in saved_parts
        ]
        for part, saved in zip(self.parts, saved_parts, strict=True):
            part.load_state_dict(saved["state"])

    def _open(self, index: int) -> Iterator[Any]:
        part, position = self.parts[index], self._positions[index]
        # Only a pass that begins sets its epoch: in the middle of a pass, this would lose the position.
        if position.passes and not position.batch:
            part.set_epoch(epoch_of_pass(self._epoch, position.passes))
        return iter(part)


def rewound(state: dict[str, Any], batch: int) -> dict[str, Any]:
    """Return the state that a `TrainingCombination` had after fewer batches of the same epoch.

    Args:
        state: its current state.
        batch: how many batches it had handed out.

    Raises:
        CheckpointError: a loader keeps its own position, which can't be set back.
    """
    is_sequential = state["mode"] == "sequential"
    back, parts = state["batch"] - batch, []
    # In sequence, the batches to take back are the last batches of the last loaders.
    for part in reversed(state["parts"]) if is_sequential else state["parts"]:
        passes, position, ended = part["passes"], part["batch"], part["ended"]
        if is_sequential:
            taken_back = min(back, position)
            position, back, ended = position - taken_back, back - taken_back, ended and not taken_back
        elif ended or state["mode"] == "max_size":
            position, ended = min(position, batch), ended and position <= batch
        elif position >= back:
            position -= back
        else:
            passes, position = passes - 1, part["before"] + position - back
        parts.append(_moved(part, passes, position, ended, state["epoch"]))

    if is_sequential:
        parts.reverse()
    return {**state, "batch": batch, "parts": parts}


def _moved(part: dict[str, Any], passes: int, batch: int, ended: bool, epoch: int) -> dict[str, Any]:
    """Return the state of one loader of a combination, set back to an earlier position."""
    if (passes, batch, ended) == (part["passes"], part["batch"], part["ended"]):
        return part
    own = part["state"]
    if "own" in own or ("parts" in own and passes != part["passes"]):
        raise CheckpointError(
            "A loader of a combined loader has handed out a batch that was not trained on. This loader keeps its own "
            "position, which can't be set back. Use a map-style DataLoader or a footplate.data.Loader."
        )
    own = rewound(own, batch) if "parts" in own else {**own, "batch": batch, "epoch": epoch_of_pass(epoch, passes)}
    return {**part, "passes": passes, "batch": batch, "ended": ended, "state": own}
