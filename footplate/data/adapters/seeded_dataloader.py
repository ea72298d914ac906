"""A map-style torch DataLoader, made resumable at any batch.

The user's sampler draws the order of an epoch under a seed of its own (`sampler_order.py`), so all ranks draw the same
order. Each rank takes its shares of it (`order/sharding.py`). A copy of the user's loader reads the rows. It is of the
same class and has the same data set, only its sampler is another (`seeded_batches.py`): it seeds the generators of the
process that makes a batch.

So the order and the augmentation don't depend on anything that was drawn before, and any batch can be the first.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler, Subset

from footplate.core import rng
from footplate.core.errors import CheckpointError, ConfigError
from footplate.core.hashing import hashed
from footplate.data.adapters.sampler_order import Order, SamplerOrder, head_of
from footplate.data.adapters.seeded_batches import SeededBatches
from footplate.data.adapters.torch_dataloader import (
    announce_epoch,
    copy_loader,
    iterates_itself,
    overrides,
    samplers_of,
)
from footplate.data.adapters.wrappers import Positioned, warn_of_replay
from footplate.data.digest import Digest
from footplate.data.order.sharding import Share, share_batches, share_rows
from footplate.distributed.consistency import digest
from footplate.distributed.world import SINGLE, World

# In an epoch without an end, only the weights of the newest batches are kept.
_KEPT_WEIGHTS = 4096


class SeededDataLoader(Positioned):
    """A map-style torch DataLoader whose every batch is a function of (seed, epoch, batch, rank).

    If the sampler shares out its rows by itself (`DistributedSampler`), it continues to do so.

    If the loader's class has an `__iter__` or `_get_iterator` of its own, that code runs, on the copy. It may drop
    batches or make more of them. So to resume, the epoch is read again from its first batch.

    Args:
        loader: the user's loader. Its `batch_size` is that of one rank. If its batch sampler is of a class of the
            user's, the batches are dealt out to the ranks; so are the items of a loader with `batch_size=None`.
        seed: the run's seed.
        shuffle: False keeps the order fixed.
        world: rank and world size of this process.
        shared: False leaves the sampler as it is: each rank has the rows that its own sampler gives.

    Attributes:
        original: the user's loader.
        loader: the copy that reads the rows.
    """

    def __init__(
        self, loader: DataLoader[Any], seed: int, shuffle: bool = True, world: World = SINGLE, shared: bool = True
    ) -> None:
        super().__init__()
        self.original = loader
        self.shared = shared
        self._seed = seed

        batch_sampler = loader.batch_sampler
        self._by_rows = type(batch_sampler) is BatchSampler
        self._batched = batch_sampler is not None
        self._source: Any = (
            batch_sampler.sampler if self._by_rows else batch_sampler if self._batched else loader.sampler  # type: ignore[union-attr]
        )
        if not shuffle:
            self._by_rows = self._batched
            self._source = range(len(loader.dataset))  # type: ignore[arg-type]
        self._sampler_order = SamplerOrder(self._source, loader, seed)

        is_distributed = isinstance(getattr(batch_sampler, "sampler", loader.sampler), DistributedSampler)
        self._shares_itself = is_distributed or not shared
        self._world = SINGLE if self._shares_itself else world
        self._rank = world.rank
        self._ranks = world.size
        # A global batch has this many rows (or ready batches) for each rank.
        self._unit = (loader.batch_size or 1) if self._by_rows else 1
        self._drop_last = bool(loader.drop_last)

        self._restored_global: int | None = None
        # The error to raise when the rest of the restored epoch is asked for.
        self._misfit: str | None = None
        # By batch, where the weight isn't 1.
        self._weights: dict[int, float] = {}
        # The order of the next epoch, if `draw_order` has drawn it already.
        self._drawn: Order | None = None
        self._saved_digest: Digest | None = None
        # The epochs that the orders in `_saved_digest` and `_order_hash` belong to.
        self._saved_epoch = self._order_epoch = -1
        self._order_hash = ""

        self._iterates_itself = iterates_itself(loader)
        self._counts_itself = overrides(loader, "__len__")
        self._seeded_batches = SeededBatches(in_workers=loader.num_workers > 0)
        # torch draws the seeds of its workers from this generator.
        self._generator = torch.Generator()
        self.loader: DataLoader[Any] = copy_loader(
            loader,
            batch_sampler=self._seeded_batches if self._batched else None,
            sampler=loader.sampler if self._batched else self._seeded_batches,
            generator=self._generator,
            _iterator=None,
        )

    @property
    def dataset(self) -> Any:
        """The user's data set."""
        return self.original.dataset

    @property
    def global_batch_size(self) -> int:
        """Rows (or ready batches) of a full batch over all ranks.

        After resuming on another number of ranks, it is still that of the checkpoint.
        """
        return self._restored_global or self._unit * self._world.size

    @property
    def content(self) -> str:
        """Text that must be the same on every rank."""
        try:
            units = len(self._source)
        except TypeError:
            return f"a {type(self._source).__name__}"
        kind, data = "rows" if self._by_rows else "items", replace(self.digest, rows="")
        return f"{units} {kind} of {data.shared}, {self.global_batch_size} over all ranks at a time"

    @property
    def digest(self) -> Digest:
        """Digest of the data: the length of the data set, the chosen part of it, and the order of the epoch."""
        return Digest(
            "dataloader", self._content, self._order_hash, uri=f"a DataLoader of {type(self.dataset).__name__}"
        )

    @functools.cached_property
    def _content(self) -> str:
        dataset: Any = self.dataset
        chosen = []
        while isinstance(dataset, Subset):
            chosen.append(list(dataset.indices))
            dataset = dataset.dataset
        return hashed(len(dataset) if hasattr(dataset, "__len__") else None, chosen)

    @property
    def endless(self) -> bool:
        """True if the sampler has no length. Its order is then drawn while it is used, a piece at a time."""
        return self._sampler_order.endless

    @property
    def shares_itself(self) -> bool:
        """True if the sampler gives each rank its own rows."""
        return self._shares_itself

    @property
    def has_own_length(self) -> bool:
        """True if code of the user's decides how many batches there are."""
        return self._iterates_itself or self._counts_itself

    def __len__(self) -> int:
        units, size = len(self._source), self.global_batch_size
        self._seeded_batches.total = units // size if self._by_rows and self._drop_last else -(-units // size)
        return len(self.loader) if self._counts_itself else self._seeded_batches.total

    def __iter__(self) -> Iterator[Any]:
        start = self._begin()
        if start and self._misfit:
            raise CheckpointError(self._misfit)

        shares = self._shares(start)
        self._seeded_batches.total = len(shares) if isinstance(shares, list) else None
        self._weights, self._seeded_batches.taken = {}, False
        items = self._seeded_items(shares, 0 if self._iterates_itself else start)
        # A subclass may iterate over the items twice, so they are a list if they can be.
        self._seeded_batches.items = list(items) if isinstance(shares, list) else items

        self._generator.manual_seed(rng.mix(self._seed, self._epoch))
        for batch in self._batches_of_subclass(start) if self._iterates_itself else self.loader:
            self._batch += 1
            yield batch

    def _seeded_items(self, shares: Iterable[Share], first: int) -> Iterator[tuple[int, Any]]:
        """Yield the seed and the rows of each batch from `first` on, and note the weights of all batches."""
        rank = (self._rank,) if self._rank else ()
        for index, share in enumerate(shares):
            if share.weight != 1.0:
                self._weights[index] = share.weight
                if len(self._weights) > _KEPT_WEIGHTS and self._seeded_batches.total is None:
                    del self._weights[next(iter(self._weights))]
            if index >= first:
                seed = rng.mix(self._seed, self._epoch, index, *rank)
                yield seed, share.rows if self._batched else share.rows[0]

    def _batches_of_subclass(self, start: int) -> Iterator[Any]:
        """Yield the batches from `start` on of a class that iterates itself. Earlier batches are read and dropped."""
        for number, batch in enumerate(self.loader):
            if number == 0 and not self._seeded_batches.taken:
                self._check_sampler_unused(start)
            if number >= start:
                yield batch

    def _check_sampler_unused(self, start: int) -> None:
        """Raise or warn about a class that reads its rows without its sampler.

        Its batches can't be shared out, and may be others each time.
        """
        name = type(self.original).__name__
        if self._world.size > 1:
            raise ConfigError(
                f"{name} makes its batches without its sampler, so they can't be shared out among {self._world.size} "
                "ranks: each would train on all of them. Let its __iter__ use super().__iter__(), or share the rows out "
                "yourself in an iterable that is no DataLoader."
            )
        if start:
            warn_of_replay(name, start)

    def weight(self, batch: int) -> float:
        """Weight of this rank's share of a batch of the current epoch; 0 if the share is another rank's."""
        return self._weights.get(batch, 1.0)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        announce_epoch(epoch, *samplers_of(self.original), self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """The position, the sizes of the batches that it counts, and the digest of the data."""
        sizes = {"batch_size": self._unit, "global_batch_size": self.global_batch_size, "ranks": self._ranks}
        return {**super().state_dict(), **sizes, "data": self.digest.state_dict(), "order_epoch": self._order_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches of a state. On another number of ranks, the global batches stay the same.

        If the position means nothing to this loader, since its batches are others, iterating over the rest of that epoch
        raises a `CheckpointError`. Any other epoch is unaffected.
        """
        super().load_state_dict(state)
        self._restored_global, self._misfit = None, None
        # Checkpoints of earlier versions have no digest of the data.
        self._saved_digest = Digest.from_state(state["data"]) if "data" in state else None
        self._saved_epoch = state.get("order_epoch", -1)

        self._misfit = self._misfit_of(state)
        if self._misfit is None:
            size = state.get("global_batch_size")
            same_size = size in (None, self._unit * self._world.size)
            self._restored_global = None if same_size else size

    def _misfit_of(self, state: dict[str, Any]) -> str | None:
        """Say why a position in mid-epoch can't be continued here; None if it can."""
        saved, size, ranks = self._saved_digest, state.get("global_batch_size"), state.get("ranks", self._ranks)
        if saved is not None and saved.content != self._content:
            return (
                f"The checkpoint was made in mid-epoch on another data set ({saved.uri}): this data set "
                f"({self.digest.uri}) has another length, or other rows of it were chosen (Subset), so its position means "
                "other rows. Give the same data set to resume, or resume from a checkpoint of the end of an epoch."
            )

        # The sizes agree, so the position means the same rows.
        if size in (None, self._unit * self._world.size) and (ranks == self._ranks or not self._shares_itself):
            return None

        if self._shares_itself or not self._batched:
            reason = "a sampler that shares out its rows by itself" if self._shares_itself else "batch_size=None"
            return (
                f"The checkpoint was made in mid-epoch on {ranks} rank(s), this run has {self._ranks}, and {reason} can't "
                f"be shared out again. Resume on {ranks}, or let the trainer share out a DataLoader with a batch_size."
            )

        if state.get("batch_size") != self._unit:
            return (
                f"The checkpoint was made in mid-epoch with batch_size={state.get('batch_size')} on {ranks} rank(s) (a "
                f"global batch of {size}), this run has batch_size={self._unit} on {self._ranks}, so its position means "
                f"other rows. Use batch_size={state.get('batch_size')} to resume."
            )
        return None

    def _shares(self, start: int) -> list[Share] | Iterator[Share]:
        """Return this rank's shares of the epoch. `start` of them were handed out before a checkpoint."""
        order = self._sampler_order.draw(self._epoch) if self._drawn is None else self._drawn
        head, order = head_of(order)
        self._order_hash, self._order_epoch = hashed(head), self._epoch

        saved = self._saved_digest if self._saved_epoch == self._epoch else None
        if start and saved is not None and saved.rows != self._order_hash:
            warnings.warn(
                f"The sampler of {self.digest.uri} gives another order of epoch {self._epoch} than when the checkpoint was "
                "made, so the rest of this epoch isn't what it would have been. Use the same sampler to resume exactly.",
                stacklevel=2,
            )

        self._drawn = None
        if isinstance(order, list):
            return self._shares_of(order)
        size = self.global_batch_size
        pieces = iter(lambda: list(itertools.islice(order, size)), [])
        return (share for piece in pieces for share in self._shares_of(piece))

    def _shares_of(self, order: list[Any]) -> list[Share]:
        """Return this rank's shares of an order, of an epoch, or of one global batch."""
        rank, ranks = self._world.rank, self._world.size
        if self._by_rows:
            return share_rows(order, self.global_batch_size, self._drop_last, rank, ranks)
        batches = order if self._batched else [[item] for item in order]
        return share_batches(batches, self.global_batch_size, rank, ranks)

    def draw_order(self) -> str | None:
        """Draw the order of the next epoch, and return a text to compare between ranks.

        A sampler of the user's might give each rank another order. The text is equal only for equal orders (for an equal
        beginning, if the sampler has no length). It is None if the orders can only be equal.
        """
        if self._world.size == 1 or type(self._source) in (range, SequentialSampler, RandomSampler):
            return None
        head, self._drawn = head_of(self._sampler_order.draw(self._epoch))
        return f"{len(head)} {'rows' if self._by_rows else 'items'} [{digest(head)}]"

    def draw_for(self, loaders: Iterable[SeededDataLoader]) -> None:
        """Draw the order of the next epoch once, for several loaders with the same sampler."""
        order = self._sampler_order.draw(self._epoch) if self._drawn is None else self._drawn
        for loader in loaders:
            loader._drawn = order
