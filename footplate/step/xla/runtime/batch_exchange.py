"""Agreement between processes on the rows of a batch, before all of them train on it.

    process 0   0 1 2 3     equal numbers of rows: each process goes on with its own rows, at once
    process 1   4 5 6 7

    process 0   0 1 2       otherwise: they exchange the rows, so that both have 0 1 2 3 4, and lay these out
    process 1   3 4         over all devices, as one process with all rows does (`sharding.py`)

If some processes called a program for one form of batch and others for another, they would wait for each other for
ever. So before each call they compare the forms, in one small exchange between hosts. The devices have work in the
meantime. A process without rows, which was given the rows of another, brings none. Only a batch of unequal rows, such
as the last of an epoch, costs an exchange of rows.

Each process draws its own random numbers on the host. The program draws with the seed of the first process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from footplate.core.errors import DataError
from footplate.step.base import StepSpec
from footplate.step.xla.runtime.program_cache import Form
from footplate.step.xla.runtime.sharding import Flat, rows_of

_POSITIVE = (1 << 63) - 1
# Sent instead of a form: this process can't train on its own rows alone.
_APART = -1


class BatchExchange:
    """Exchanges of forms and rows between the processes. All processes call its methods together.

    Args:
        spec: the parts and settings of the step, with the group of its processes.
    """

    def __init__(self, spec: StepSpec) -> None:
        self._group, self._weight = spec.group, spec.weight
        self._known: dict[tuple[int, Form], int] = {}

    def agree(self, batches: Sequence[Flat], first: int, fit: bool, seed: int) -> tuple[bool, int]:
        """Find out if each process can train on its own rows, and take over the seed of the first process.

        Args:
            batches: the batches of this process.
            first: the index of the first batch in the epoch.
            fit: this process can train on its own rows.
            seed: the seed of this process.

        Returns:
            True if every process can, and the common seed.
        """
        fit = fit and all(self._counts(index) for index in range(first, first + len(batches)))
        form = self._digest(len(batches), Form.of(batches[0])) if fit else _APART
        most, least, seed = self._group.maximum([form, -form, seed & _POSITIVE if self._group.world.rank == 0 else 0])
        return most == -least and fit, seed

    def exchange(self, batch: Flat, index: int) -> tuple[Flat, float]:
        """A batch with the rows of all processes, in rank order, and this process's share of the rows.

        Raises:
            DataError: their batches differ in more than the number of rows.
        """
        own = [leaf.contiguous().clone() for leaf in batch.leaves] if self._counts(index) else None
        everyone = self._group.gather((str(batch.tree), own))
        having = [(rank, tree, leaves) for rank, (tree, leaves) in enumerate(everyone) if leaves is not None]
        if len({(tree, *map(_apart_from_rows, leaves)) for _, tree, leaves in having}) > 1:
            told = "; ".join(f"process {rank} has {Form.of(Flat(leaves, None, []))}" for rank, _, leaves in having)
            raise DataError(
                f"batch {index} of the epoch differs between the processes in more than the number of its rows, the first "
                f"dimension of each tensor: {told}. One program trains on all of it: bring batches into one form, such as "
                "by padding to a fixed length."
            )
        whole = [_joined(pieces) for pieces in zip(*(leaves for _, _, leaves in having), strict=True)]
        rows = 0 if own is None else rows_of(own)
        return Flat(whole, batch.tree, batch.left_out), rows / rows_of(whole)

    def _counts(self, index: int) -> bool:
        return self._weight is None or self._weight(index) != 0.0

    def _digest(self, count: int, form: Form) -> int:
        """A hash of a form, the same in every process."""
        number = self._known.get((count, form))
        if number is None:
            digest = hashlib.blake2b(f"{count} {form.tree} {form}".encode(), digest_size=7).digest()
            number = self._known[count, form] = int.from_bytes(digest)
        return number


def _apart_from_rows(leaf: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return leaf.ndim, leaf.shape[1:], leaf.dtype


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """Return the rows of all processes. A tensor without rows is the first process's."""
    return torch.cat(list(pieces)) if pieces[0].ndim else pieces[0]
