"""The history of a run's steps: from which batches each optimizer step was made, kept in every checkpoint.

The order of rows is a pure function (`footplate.data.order.plan`), so nothing needs to be logged to name the rows of a step
later. But the function needs to know the epoch and the batches of the step, the number of ranks, and the loader's settings.
The history keeps these as *stretches*. A stretch is a position of the run, and the rule that was followed from there:

    epoch 0, batch 0, step 0     100 batches an epoch, 2 for each step, 4 ranks, loader 0
    epoch 3, batch 40, step 170  100 batches an epoch, 2 for each step, 2 ranks, loader 0       resumed on fewer ranks

Each epoch and each attempt begins with a call of `note`. It adds a stretch only if the run has left the rule: another
number of ranks, another loader, an epoch that ended early, batches that made no step. So most runs have one stretch for all
epochs.

`find` goes back from a step to its batches. If batches of an epoch made no step (`training_step` returned None), it isn't
known which, and `find` raises an error for the steps of that epoch.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from footplate.core.errors import ConfigError
from footplate.core.hashing import hashed


@dataclass(frozen=True)
class Position:
    """A position between two batches; see `Progress`."""

    epoch: int
    batch_idx: int
    batches: int
    global_step: int


@dataclass(frozen=True)
class Stretch:
    """A position, and the rule that the run followed from there.

    Attributes:
        epoch: complete epochs at the position.
        batch_idx: trained batches of the epoch in progress.
        batches: trained batches since the beginning.
        global_step: optimizer steps since the beginning.
        total: batches of an epoch; 0 if the loader doesn't know.
        accumulate: batches of a step; 0 with manual optimisation, whose steps follow no rule.
        ranks: the number of ranks.
        loader: the index of the loader's settings among those of the history.
    """

    epoch: int
    batch_idx: int
    batches: int
    global_step: int
    total: int
    accumulate: int
    ranks: int
    loader: int

    @property
    def rule(self) -> tuple[int, int, int, int]:
        """Everything but the position."""
        return self.total, self.accumulate, self.ranks, self.loader

    @property
    def steps_of_epoch(self) -> int:
        """Steps of a whole epoch, whose end also ends an accumulation window."""
        return -(-self.total // self.accumulate)

    def windows(self, batches: int) -> int:
        """The steps that the first batches of an epoch make."""
        return self.steps_of_epoch if batches >= self.total else batches // self.accumulate

    def start_of(self, epoch: int) -> Position:
        """The beginning of an epoch by this rule. For the epoch of the stretch itself, it may be before the stretch."""
        before = epoch - self.epoch
        batches = self.batches - self.batch_idx + before * self.total
        first_step = self.global_step - self.windows(self.batch_idx)
        return Position(epoch, 0, batches, first_step + before * self.steps_of_epoch)

    def leads_to(self, position: Position) -> bool:
        """Return True if this rule reaches a position exactly."""
        if not self.total:
            return True
        if not self.accumulate:
            return self.batches + (position.epoch - self.epoch) * self.total - self.batch_idx == (
                position.batches - position.batch_idx
            )
        start = self.start_of(position.epoch)
        reached = start.batches + position.batch_idx, start.global_step + self.windows(position.batch_idx)
        return reached == (position.batches, position.global_step)


@dataclass(frozen=True)
class StepBatches:
    """The batches that made a step.

    Attributes:
        step: the step, from 1.
        epoch: its epoch.
        first: the index of its first batch in the epoch.
        stop: the index after its last batch.
        ranks: the number of ranks.
        loader: the loader's settings; see `footplate.data.adapters.order_record`.
        planned: the checkpoint is older than the step, which follows from the rule at the checkpoint.
    """

    step: int
    epoch: int
    first: int
    stop: int
    ranks: int
    loader: dict[str, Any]
    planned: bool


def hash_weights(module: torch.nn.Module) -> str:
    """Return a hash of the parameters and buffers of a module; empty if it has other tensors than plain ones.

    A replay that begins with new weights compares it, since an unseeded model has other weights each time.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    if any(is_lazy(tensor) for _, tensor in named):
        return ""
    tensors = {name: tensor.detach() for name, tensor in named}
    if not all(
        type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta for tensor in tensors.values()
    ):
        return ""
    return hashed(
        [[name, str(tensor.dtype), str(tuple(tensor.shape)), _checksum(tensor)] for name, tensor in tensors.items()]
    )


def _checksum(tensor: Tensor) -> int:
    flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy()) if tensor.numel() else 0  # pyright: ignore[reportArgumentType]


class StepHistory:
    """The history of a run's steps; see the docstring of this file.

    Attributes:
        initial: a hash of the weights with which the run began; empty if it isn't known.
    """

    def __init__(self) -> None:
        self.initial = ""
        self._stretches: list[Stretch] = []
        self._loaders: list[dict[str, Any] | None] = []
        # The loader in use, whose settings are only looked at when they are needed, and the function that does it.
        self._loader: Any = None
        self._describe: Callable[[Any], dict[str, Any]] | None = None

    def note(
        self,
        position: Position,
        total: float,
        accumulate: int,
        ranks: int,
        loader: Any,
        describe: Callable[[Any], dict[str, Any]],
    ) -> None:
        """Note the position at the beginning of an epoch, or of the rest of one.

        Args:
            position: the run's position.
            total: batches of an epoch; infinite if the loader doesn't know.
            accumulate: batches of a step; 0 with manual optimisation.
            ranks: the number of ranks.
            loader: the loader, made resumable.
            describe: returns the settings of a loader, as plain values.
        """
        if loader is not self._loader:
            self._use(loader, describe)
        count = int(total) if math.isfinite(total) else 0
        stretch = Stretch(
            **vars(position), total=count, accumulate=accumulate, ranks=ranks, loader=len(self._loaders) - 1
        )

        last = self._stretches[-1] if self._stretches else None
        if last is not None and last.rule == stretch.rule and last.leads_to(position):
            return
        self._stretches.append(stretch)

    def _use(self, loader: Any, describe: Callable[[Any], dict[str, Any]]) -> None:
        self._look()
        before, settings = self._loaders[-1] if self._loaders else None, None
        self._loader, self._describe = loader, describe
        if before is not None:
            # A resumed run, or loaders that are made again in each epoch: most often the settings are the same.
            settings = describe(loader)
            if settings == before:
                return
        self._loaders.append(settings)

    def _look(self) -> None:
        """Look at the settings of the loader in use."""
        if self._loaders and self._loaders[-1] is None:
            assert self._describe is not None
            self._loaders[-1] = self._describe(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain values."""
        self._look()
        return {
            "initial": self.initial,
            "stretches": [list(dataclasses.astuple(stretch)) for stretch in self._stretches],
            "loaders": [*self._loaders],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a history. An empty state, of an earlier version of Footplate, begins one at the present position."""
        self.initial = state.get("initial", "")
        self._stretches = [Stretch(*values) for values in state.get("stretches", [])]
        self._loaders = [*state.get("loaders", [])]
        self._loader = self._describe = None

    def find(self, step: int, position: Position) -> StepBatches:
        """Return the batches of a step.

        Args:
            step: the step, from 1.
            position: the position of the checkpoint that holds this history.

        Raises:
            ConfigError: the history doesn't know the step.
        """
        self._look()
        stretches = [*self._stretches]
        if not stretches:
            raise ConfigError(
                "the checkpoint doesn't tell which batches made the steps: an earlier version of Footplate, or another "
                "library, wrote it."
            )
        if step <= stretches[0].global_step:
            raise ConfigError(
                f"step {step}: the history of the run begins after step {stretches[0].global_step}, with its first "
                "checkpoint of this version of Footplate."
            )

        # The checkpoint's own position ends the last stretch. If the rule doesn't lead there, a new stretch begins there.
        if not stretches[-1].leads_to(position):
            stretches.append(dataclasses.replace(stretches[-1], **vars(position)))
        index = bisect.bisect_left([stretch.global_step for stretch in stretches], step) - 1
        stretch = stretches[index]
        if not stretch.total or not stretch.accumulate:
            reason = (
                "its loader doesn't know how many batches an epoch has"
                if not stretch.total
                else "the module optimises manually, so a batch may make any number of steps"
            )
            raise ConfigError(f"step {step}: it isn't recorded which batches made it: {reason}.")

        windows = step - 1 - stretch.start_of(stretch.epoch).global_step
        epoch, window = divmod(windows, stretch.steps_of_epoch)
        first = window * stretch.accumulate
        stop = min(first + stretch.accumulate, stretch.total)
        epoch += stretch.epoch
        if index + 1 < len(stretches):
            _check_known(step, epoch, stop, stretch, stretches[index + 1])
        loader = self._loaders[stretch.loader]
        assert loader is not None
        return StepBatches(step, epoch, first, stop, stretch.ranks, loader, step > position.global_step)


def _check_known(step: int, epoch: int, stop: int, stretch: Stretch, following: Stretch) -> None:
    """Check that a step of a stretch was made by the batches that the rule names.

    Raises:
        ConfigError: batches of its epoch made no step.
    """
    position = Position(following.epoch, following.batch_idx, following.batches, following.global_step)
    if stretch.leads_to(position):
        return

    # Every epoch but the last of a stretch followed the rule.
    last = position.epoch if position.batch_idx else position.epoch - 1
    start = stretch.start_of(last)
    batches, steps = position.batches - start.batches, position.global_step - start.global_step
    ended_early = batches < stretch.total and steps in (
        batches // stretch.accumulate,
        -(-batches // stretch.accumulate),
    )
    if epoch < last or (epoch == last and ended_early and stop <= batches):
        return
    raise ConfigError(
        f"step {step}: it isn't known which batches made it. In epoch {last}, {batches} batches made {steps} steps instead "
        f"of {stretch.windows(batches)}, because training_step returned None for some of them."
    )
