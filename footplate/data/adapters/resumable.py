"""Loaders of every kind, made resumable: what the trainer trains on.

    footplate.data.Loader               as it is: it keeps its own position
    torch DataLoader over a map set     a copy with another sampler: the epoch's order is drawn from (seed, epoch), and the
                                        generators that a set's augmentation uses are seeded for every batch, in whichever
                                        process it is made; a sampler without a length, which may never end, is drawn
                                        while it is used
    a subclass that iterates itself     such a copy too, which runs the subclass's own code; to resume, it is read again
                                        from the beginning of the epoch, since its batches may not be those of its sampler
    anything with state_dict            (torchdata's StatefulDataLoader, say) asked for its own position
    a list of batches                   indexed
    any other iterable                  read again up to where it was, with a warning that says what that means
    several loaders                     each made resumable, and combined; see `combined.py`

All have the same things: `len()` if it can be known, iteration over the rest of the epoch, `set_epoch`, and
`state_dict`/`load_state_dict`.

With several ranks, a `footplate.data.Loader` and a map-style DataLoader are shared out: global batch b is the same rows
whatever the number of ranks (see `sharing.py`), `even(loader)` is true, and `weight(b)` says how much a rank's share
counts. Of anything else every rank iterates its own, and their lengths may differ.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from footplate.core import rng
from footplate.core.errors import CheckpointError, ConfigError
from footplate.core.hashing import hashed
from footplate.data.adapters.combined import (
    Combination,
    CombinedLoader,
    TrainingCombination,
    flatten,
    holds_loaders,
    is_combined,
    leaves_of,
    mode_of,
)
from footplate.data.adapters.seeded_indices import Tickets
from footplate.data.digest import Digest
from footplate.data.order.sharding import Share, share_batches, share_rows
from footplate.distributed.consistency import digest
from footplate.distributed.world import SINGLE, World

_PIECE = 256  # items that are drawn at a time from a sampler without a length
_WEIGHTS = 4096  # batches, the newest, whose weights are kept in an epoch without an end


def adapt(loader: Any, seed: int, shuffle: bool = True, world: World = SINGLE, shared: bool = True) -> Any:
    """Wrap what a user gave as a training loader, unless it is a `footplate.data.Loader` already.

    Args:
        loader: any of the above.
        seed: the run's.
        shuffle: False keeps a DataLoader's order fixed (to overfit a few batches).
        world: this process's place among the ranks.
        shared: whether the rows of a DataLoader are shared out among the ranks. Otherwise its sampler is used as it is.

    Raises:
        ConfigError: it can't be iterated.
    """
    if holds_loaders(loader):
        leaves, build = flatten(loader)
        seeds = [seed, *(rng.mix(seed, index) for index in range(1, len(leaves)))]  # else equal sets have equal orders
        parts = [adapt(*one, shuffle, world, shared) for one in zip(apart(leaves), seeds, strict=True)]
        return TrainingCombination(parts, build, mode_of(loader, "max_size_cycle"))
    if isinstance(loader, DataLoader):
        if isinstance(loader.dataset, IterableDataset):
            own_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
            return StatefulLoader(loader) if own_state else ReplayedLoader(loader)
        begun = _has_begun(loader)
        return ReplayedLoader(loader) if begun else SeededDataLoader(loader, seed, shuffle, world, shared)
    if hasattr(loader, "set_epoch") and hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return loader if shuffle else SameEpoch(loader)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return StatefulLoader(loader)
    if not isinstance(loader, Iterable):
        raise ConfigError(f"train_dataloader() returned {type(loader).__name__}, which can't be iterated over.")
    return ReplayedLoader(loader)


def share_out(loader: Any, seed: int, world: World, shared: bool = True) -> Any:
    """An evaluation loader, of which each rank gets its share where that can be; rows are never given twice.

    Args:
        loader: any iterable of batches.
        seed: the run's.
        world: this process's place among the ranks.
        shared: see `adapt`.
    """
    if is_combined(loader):
        leaves, build = flatten(loader)
        parts = [share_out(leaf, seed, world, shared) for leaf in apart(leaves)]
        return Combination(parts, build, mode_of(loader, "sequential"))
    if not shared or world.size == 1 or not isinstance(loader, DataLoader):
        return loader
    alone = isinstance(loader.dataset, IterableDataset) or _has_begun(loader)
    return loader if alone else SeededDataLoader(loader, seed, world=world)


def beside(loader: Any, training: Any) -> Any:
    """An evaluation loader with a place of its own also where the one that training is in the midst of was given.

    Args:
        loader: any iterable of batches.
        training: what trains in the same run, if anything does.
    """
    if is_combined(loader):
        leaves, build = flatten(loader)
        return CombinedLoader(build(iter([beside(leaf, training) for leaf in leaves])), mode_of(loader, "sequential"))
    among = any(loader is one for one in leaves_of(training))
    return _with_own_place(loader) if among else loader


def apart(loaders: Sequence[Any]) -> list[Any]:
    """The same loaders, each with a place of its own also where one is there twice."""
    return [
        _with_own_place(loader) if any(loader is earlier for earlier in loaders[:index]) else loader
        for index, loader in enumerate(loaders)
    ]


def _with_own_place(loader: Any) -> Any:
    """The same loader, so that iterating over it doesn't move the given one.

    A torch DataLoader makes an iterator for each `iter()`, but with `persistent_workers=True` it has only one.
    """
    if isinstance(loader, DataLoader):
        return _copy(loader, _iterator=None) if loader.persistent_workers else loader
    return loader.beside() if hasattr(loader, "beside") else loader


def pin_for(loader: Any, device: torch.device) -> None:
    """Let a `footplate.data.Loader` make its batches in page-locked memory if they go to CUDA, unless its user has decided.

    Args:
        loader: any iterable of batches.
        device: where they go.
    """
    if getattr(loader, "pin_memory", False) is None:
        loader.pin_memory = device.type == "cuda"


def end_workers(loader: Any) -> None:
    """End the worker processes that a torch DataLoader with `persistent_workers=True` keeps between epochs.

    Args:
        loader: any iterable of batches, adapted or not, whose iteration has ended.
    """
    while isinstance(loader, (SameEpoch, ReplayedLoader, StatefulLoader, SeededDataLoader)):
        loader = loader.loader
    if isinstance(loader, Combination):
        for part in loader.parts:
            end_workers(part)
    elif isinstance(loader, DataLoader) and isinstance(loader._iterator, _MultiProcessingDataLoaderIter):
        iterator, loader._iterator = loader._iterator, None
        iterator._shutdown_workers()


def made_elsewhere(loader: Any) -> bool:
    """Whether batches are ready, or made by threads or processes of the loader's own, so that any thread may take them.

    Otherwise taking one runs what its author has written, which may draw from the generators that a step draws from too.

    Args:
        loader: any iterable of batches, adapted or not.
    """
    drawn = False
    while isinstance(loader, (SameEpoch, ReplayedLoader, SeededDataLoader)):
        drawn = isinstance(loader, SeededDataLoader) and not loader.endless
        loader = loader.loader
    if isinstance(loader, Combination):
        return all(map(made_elsewhere, loader.parts))
    if isinstance(loader, DataLoader):
        parts = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
        by_torch = not _iterates_itself(loader) and (drawn or all(map(_draws_before, parts)))
        return loader.num_workers > 0 and by_torch
    return hasattr(loader, "rank_rows") or type(loader) in (list, tuple)


def _draws_before(sampler: Any) -> bool:
    """Whether a sampler draws nothing from global generators once it has begun, as those of torch do."""
    return sampler is None or type(sampler).__module__.startswith("torch.utils.data.")


def _overrides(loader: DataLoader[Any], *names: str) -> bool:
    """Whether a subclass of a user's, or of a library other than torch's, defines one of these methods."""
    owners = [next(owner for owner in type(loader).__mro__ if name in vars(owner)) for name in names]
    return any(not owner.__module__.startswith(("torch.", "torchdata.")) for owner in owners)


def _iterates_itself(loader: DataLoader[Any]) -> bool:
    """Whether a subclass has code of its own between torch's batches and those that it gives."""
    return _overrides(loader, "__iter__", "_get_iterator")


def _has_begun(loader: DataLoader[Any]) -> bool:
    """Whether a loader holds an iterator that it made beforehand, so that another sampler would come too late."""
    held = (value for name, value in vars(loader).items() if name != "_iterator")
    return any(isinstance(value, _BaseDataLoaderIter) for value in held)


def even(loader: Any) -> bool:
    """Whether every rank is certain to have as many batches as the others."""
    loader = loader.loader if isinstance(loader, SameEpoch) else loader
    if isinstance(loader, Combination):
        return all(map(even, loader.parts))
    if isinstance(loader, SeededDataLoader):
        return loader.shared and not loader.has_own_length and not loader.endless
    return hasattr(loader, "rank_rows")


def content(loader: Any) -> str:
    """What a loader that is shared out holds, in words that are the same on every rank; nothing of any other."""
    loader = loader.loader if isinstance(loader, SameEpoch) else loader
    if isinstance(loader, Combination):
        return "; ".join(filter(None, map(content, loader.parts)))
    shared_out = (isinstance(loader, SeededDataLoader) and loader.shared) or hasattr(loader, "rank_rows")
    return getattr(loader, "content", "") if shared_out else ""


def draw(loader: Any) -> str | None:
    """See `SeededDataLoader.draw`; None of any other."""
    loader = loader.loader if isinstance(loader, SameEpoch) else loader
    if isinstance(loader, Combination):
        return "; ".join(filter(None, map(draw, loader.parts))) or None
    return loader.draw() if isinstance(loader, SeededDataLoader) else None


def weigher(loader: Any, world: World) -> Callable[[int], float] | None:
    """The function from a batch's index to the weight of this rank's share; None where every share counts alike."""
    loader = loader.loader if isinstance(loader, SameEpoch) else loader
    if world.size == 1:
        return None
    if isinstance(loader, Combination):
        return functools.partial(loader.weight, weights=[weigher(part, world) for part in loader.parts])
    if isinstance(loader, SeededDataLoader):
        return loader.weight
    if hasattr(loader, "rank_rows"):
        return _LoaderWeights(loader, world)
    return None


class _LoaderWeights:
    """The weights of a `footplate.data.Loader`'s batches: that of the last is its own, the others are alike."""

    def __init__(self, loader: Any, world: World) -> None:
        self._loader, self._world = loader, world

    def __call__(self, batch: int) -> float:
        return self._last if batch == self._last_batch else self._usual

    @functools.cached_property
    def _usual(self) -> float:
        return self._of(0)

    @functools.cached_property
    def _last(self) -> float:
        return self._of(self._last_batch)

    @functools.cached_property
    def _last_batch(self) -> int:  # asked for only when training has begun, so after another size has been restored
        return len(self._loader) - 1

    def _of(self, batch: int) -> float:
        return self._loader.rank_rows(batch) * self._world.size / self._loader.batch_rows(batch)


class Positioned:
    """A loader that counts the batches of the epoch it has handed out, and can begin after some of them."""

    def __init__(self) -> None:
        self._epoch = 0
        self._batch = 0
        self._start = 0

    def _begin(self) -> int:
        """The batch to begin with, which only the first iteration after `load_state_dict` gets."""
        self._batch, self._start = self._start, 0
        return self._batch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is next; from its beginning, unless it is the one that was restored."""
        if epoch != self._epoch:
            self._epoch, self._batch, self._start = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch and how many batches of it have been handed out."""
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after those batches."""
        self._epoch, self._batch, self._start = state["epoch"], state["batch"], state["batch"]


class ReplayedLoader(Positioned):
    """An iterable with no position of its own: the batches before the position are read again and dropped."""

    def __init__(self, loader: Iterable[Any]) -> None:
        super().__init__()
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        start = self._begin()
        if start and not isinstance(self.loader, Sequence):
            _warn_of_replay(type(self.loader).__name__, start)
        for batch in itertools.islice(iter(self.loader), start, None):
            self._batch += 1
            yield batch

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        _tell_epoch(epoch, self.loader, *_samplers(self.loader), getattr(self.loader, "dataset", None))


class StatefulLoader(Positioned):
    """A loader that keeps its own position."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        for batch in self.loader:
            self._batch += 1
            yield batch

    def set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch and self._start:
            for _ in self.loader:  # it was restored at the end of its epoch: let it notice
                pass
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loader.load_state_dict(state["own"])


class SameEpoch:
    """A loader that shuffles by epoch, kept at its first. Its state says in which epoch of the run it is."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._epoch = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Begin the first epoch again, unless `epoch` is the one that was restored."""
        if epoch != self._epoch:
            self.loader.set_epoch(1)
        self.loader.set_epoch(0)
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The loader's own, but for the epoch."""
        state = self.loader.state_dict()
        return {**state, "epoch": state["epoch"] + self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in that epoch of the run."""
        self._epoch = state["epoch"]
        self.loader.load_state_dict({**state, "epoch": 0})


class SeededDataLoader(Positioned):
    """A map-style torch DataLoader whose every batch is a function of (seed, epoch, batch, rank).

    The given loader's sampler draws the epoch's order, under a seed of its own, so all ranks draw the same and take their
    shares of it. A copy of the loader reads them: the same class with the same data set, only its sampler hands out
    `Tickets`, which seed the global generators of the process that makes the batch. So neither the order nor any
    augmentation depends on what was drawn before, and any batch can be the first.

    A sampler that shares out by itself (`DistributedSampler`) is left to do so. If the loader's class has an `__iter__` or
    `_get_iterator` of its own, that code runs, on the copy. As it may drop batches or make more of them, its epoch is read
    again from the first batch to resume.

    Args:
        loader: the user's. Its `batch_size` is that of one rank; a batch sampler of a class of the user's has its batches
            dealt out to the ranks, as have the items of a loader with `batch_size=None`.
        seed: the run's.
        shuffle: False keeps the order fixed.
        world: this process's place among the ranks.
        shared: False leaves the sampler as it is, so that each rank has the rows that its own gives.
    """

    def __init__(
        self, loader: DataLoader[Any], seed: int, shuffle: bool = True, world: World = SINGLE, shared: bool = True
    ) -> None:
        super().__init__()
        self.given = loader
        self.shared = shared
        self._seed = seed
        sampler = loader.batch_sampler
        self._by_rows = type(sampler) is BatchSampler
        self._batched = sampler is not None
        self._source: Any = sampler.sampler if self._by_rows else sampler if self._batched else loader.sampler  # type: ignore[union-attr]
        if not shuffle:
            self._by_rows = self._batched
            self._source = range(len(loader.dataset))  # type: ignore[arg-type]
        by_itself = isinstance(getattr(sampler, "sampler", loader.sampler), DistributedSampler)
        self._shares_itself = by_itself or not shared
        self._world = SINGLE if self._shares_itself else world
        self._rank = world.rank
        self._unit = (loader.batch_size or 1) if self._by_rows else 1
        self._drop_last = bool(loader.drop_last)
        self._ranks = world.size
        self._global: int | None = None
        self._misfit: str | None = None
        self._weights: dict[int, float] = {}  # by batch, where they aren't 1
        self._drawn: list[Any] | Iterator[Any] | None = None
        self._saved: Digest | None = None
        self._saved_epoch = self._order_epoch = -1  # the epochs whose orders are in `_saved` and `_order`
        self._order = ""
        self._iterates_itself = _iterates_itself(loader)
        self._counts_itself = _overrides(loader, "__len__")
        self._tickets = Tickets(elsewhere=loader.num_workers > 0)
        self._generator = torch.Generator()  # of the seeds that workers begin with
        self.loader: DataLoader[Any] = _copy(
            loader,
            batch_sampler=self._tickets if self._batched else None,
            sampler=loader.sampler if self._batched else self._tickets,
            generator=self._generator,
            _iterator=None,
        )

    @property
    def dataset(self) -> Any:
        """The user's data set."""
        return self.given.dataset

    @property
    def global_batch_size(self) -> int:
        """Rows (or ready batches) of a full batch over all ranks; after resuming on another number of ranks, still what
        it was.
        """
        return self._global or self._unit * self._world.size

    @property
    def content(self) -> str:
        """What must be the same on every rank."""
        try:
            units = len(self._source)
        except TypeError:
            return f"a {type(self._source).__name__}"
        kind, known = "rows" if self._by_rows else "items", replace(self.digest, rows="")
        return f"{units} {kind} of {known.shared}, {self.global_batch_size} over all ranks at a time"

    @property
    def digest(self) -> Digest:
        """What this loader's data are known by: the set's length, the chosen part of it, and the order of the epoch."""
        return Digest(
            "dataloader", self._content, self._order, uri=f"a DataLoader of {type(self.given.dataset).__name__}"
        )

    @functools.cached_property
    def _content(self) -> str:
        dataset: Any = self.given.dataset
        chosen = []
        while isinstance(dataset, Subset):
            chosen.append(list(dataset.indices))
            dataset = dataset.dataset
        return hashed(len(dataset) if hasattr(dataset, "__len__") else None, chosen)

    @property
    def endless(self) -> bool:
        """Whether the sampler has no length. Its order is then drawn while it is used, a piece at a time."""
        try:
            len(self._source)
        except TypeError:
            return True
        return False

    @property
    def has_own_length(self) -> bool:
        """Whether code of the user's decides how many batches there are."""
        return self._iterates_itself or self._counts_itself

    def __len__(self) -> int:
        units, size = len(self._source), self.global_batch_size
        self._tickets.total = units // size if self._by_rows and self._drop_last else -(-units // size)
        return len(self.loader) if self._counts_itself else self._tickets.total

    def __iter__(self) -> Iterator[Any]:
        start = self._begin()
        if start and self._misfit:
            raise CheckpointError(self._misfit)
        shares = self._shares(start)
        self._tickets.total = len(shares) if isinstance(shares, list) else None
        self._weights, self._tickets.taken = {}, False
        items = self._items(shares, 0 if self._iterates_itself else start)
        self._tickets.items = (
            list(items) if isinstance(shares, list) else items
        )  # a subclass may iterate over them twice
        self._generator.manual_seed(rng.mix(self._seed, self._epoch))
        for batch in self._made_by_subclass(start) if self._iterates_itself else self.loader:
            self._batch += 1
            yield batch

    def _items(self, shares: Iterable[Share], first: int) -> Iterator[tuple[int, Any]]:
        """The seed and the rows of each batch from `first` on; notes the weights of all."""
        rank = (self._rank,) if self._rank else ()
        for index, share in enumerate(shares):
            if share.weight != 1.0:
                self._weights[index] = share.weight
                if len(self._weights) > _WEIGHTS and self._tickets.total is None:
                    del self._weights[next(iter(self._weights))]
            if index >= first:
                seed = rng.mix(self._seed, self._epoch, index, *rank)
                yield seed, share.rows if self._batched else share.rows[0]

    def _made_by_subclass(self, start: int) -> Iterator[Any]:
        """The batches from `start` on that a class with an iteration of its own makes; those before are dropped."""
        for number, batch in enumerate(self.loader):
            if number == 0 and not self._tickets.taken:
                self._check_apart(start)
            if number >= start:
                yield batch

    def _check_apart(self, start: int) -> None:
        """A class that reads its rows without its sampler can't be shared out, and may give other batches each time."""
        name = type(self.given).__name__
        if self._world.size > 1:
            raise ConfigError(
                f"{name} makes its batches without its sampler, so they can't be shared out among {self._world.size} "
                "ranks: each would train on all of them. Let its __iter__ use super().__iter__(), or share the rows out "
                "yourself in an iterable that is no DataLoader."
            )
        if start:
            _warn_of_replay(name, start)

    def weight(self, batch: int) -> float:
        """How much this rank's share of a batch of the epoch in progress counts; 0 where it is another rank's."""
        return self._weights.get(batch, 1.0)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        _tell_epoch(epoch, *_samplers(self.given), self.given.dataset)

    def state_dict(self) -> dict[str, Any]:
        """The position, and in which batches it counts."""
        sizes = {"batch_size": self._unit, "global_batch_size": self.global_batch_size, "ranks": self._ranks}
        return {**super().state_dict(), **sizes, "data": self.digest.state_dict(), "order_epoch": self._order_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after those batches; on another number of ranks, with the same global batches.

        Where the position means nothing to this loader, since its batches are others, iterating over the rest of that
        epoch raises a `CheckpointError`; any other epoch is as good as new.
        """
        super().load_state_dict(state)
        size, ranks = state.get("global_batch_size"), state.get("ranks", self._ranks)
        self._global, self._misfit = None, None
        self._saved = Digest.from_state(state["data"]) if "data" in state else None  # an earlier version has none
        self._saved_epoch = state.get("order_epoch", -1)
        if self._saved is not None and self._saved.content != self._content:
            self._misfit = (
                f"The checkpoint was made in mid-epoch on another data set ({self._saved.uri}): this one "
                f"({self.digest.uri}) has another length, or other rows of it were chosen (Subset), so its position means "
                "other rows. Give the same data set to resume, or resume from a checkpoint of the end of an epoch."
            )
            return
        if size in (None, self._unit * self._world.size) and (ranks == self._ranks or not self._shares_itself):
            return
        if self._shares_itself or not self._batched:
            self._misfit = (
                f"The checkpoint was made in mid-epoch on {ranks} rank(s), this run has {self._ranks}, and "
                f"{'a sampler that shares out by itself' if self._shares_itself else 'batch_size=None'} can't be shared "
                f"out again. Resume on {ranks}, or let the trainer share out a DataLoader with a batch_size."
            )
        elif state.get("batch_size") != self._unit:
            self._misfit = (
                f"The checkpoint was made in mid-epoch with batch_size={state.get('batch_size')} on {ranks} rank(s) (a "
                f"global batch of {size}), this run has batch_size={self._unit} on {self._ranks}, so its position means "
                f"other rows. Use batch_size={state.get('batch_size')} to resume."
            )
        else:
            self._global = size

    def _shares(self, start: int) -> list[Share] | Iterator[Share]:
        """The shares of this rank in the epoch, of which `start` were handed out before a checkpoint."""
        order = self._draw_order() if self._drawn is None else self._drawn
        head, order = _head_of(order)
        self._order, self._order_epoch = hashed(head), self._epoch
        saved = self._saved if self._saved_epoch == self._epoch else None
        if start and saved is not None and saved.rows != self._order:
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
        """The shares of this rank in an epoch, or in one global batch, by its order."""
        rank, ranks = self._world.rank, self._world.size
        if self._by_rows:
            return share_rows(order, self.global_batch_size, self._drop_last, rank, ranks)
        batches = order if self._batched else [[item] for item in order]
        return share_batches(batches, self.global_batch_size, rank, ranks)

    def draw(self) -> str | None:
        """Draw the order of the pass that comes next, where a sampler of the user's might give each rank another one; gives
        a word that is the same only for the same order (for the same beginning, if the sampler has no length). None where
        it can only be the same.
        """
        if self._world.size == 1 or type(self._source) in (range, SequentialSampler, RandomSampler):
            return None
        head, self._drawn = _head_of(self._draw_order())
        return f"{len(head)} {'rows' if self._by_rows else 'items'} [{digest(head)}]"

    def _draw_order(self) -> list[Any] | Iterator[Any]:
        """What the user's sampler gives for this epoch, leaving the global generators as they were."""
        pieces = self._draw_pieces(_PIECE if self.endless else None)
        return itertools.chain.from_iterable(pieces) if self.endless else next(pieces)

    def _draw_pieces(self, size: int | None) -> Iterator[list[Any]]:
        """The order in pieces. Between two of them, the sampler's random states are kept apart from the training's."""
        generators = [sampler.generator for sampler in _samplers(self.given) if getattr(sampler, "generator", None)]
        seed = rng.mix(self._seed, self._epoch)
        indices: Iterator[Any] | None = None
        states: tuple[dict[str, Any], list[Tensor]] | None = None
        while True:
            before = rng.capture()
            try:
                if states is None:
                    rng.seed_globals(seed)
                    for generator in generators:
                        generator.manual_seed(seed)
                else:
                    rng.restore(states[0])
                    for generator, state in zip(generators, states[1], strict=True):
                        generator.set_state(state)
                indices = iter(self._source) if indices is None else indices
                piece = list(itertools.islice(indices, size))
                states = rng.capture(), [generator.get_state() for generator in generators]
            finally:
                rng.restore(before)
            if not piece and size is not None:
                return
            yield piece


def _head_of(order: list[Any] | Iterator[Any]) -> tuple[list[Any], list[Any] | Iterator[Any]]:
    """What an order is known by, and the same order: all of it, or its beginning where it is drawn while it is used."""
    if isinstance(order, list):
        return order, order
    head = list(itertools.islice(order, _PIECE))
    return head, itertools.chain(head, order)


def _copy(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """A loader of the same class and state but for some attributes, which torch forbids to change later."""
    copied: DataLoader[Any] = object.__new__(type(loader))
    vars(copied).update(vars(loader) | changed)
    return copied


def _samplers(loader: Any) -> list[Any]:
    """The samplers of a DataLoader, each once: its own, its batch sampler, and the one within that."""
    batches = getattr(loader, "batch_sampler", None)
    found = {id(one): one for one in (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))}
    return [one for one in found.values() if one is not None]


def tell_samplers(loader: Any, epoch: int) -> None:
    """Tell the samplers of an evaluation loader which epoch it is, as training does with its own."""
    if isinstance(loader, Combination):
        for part in loader.parts:
            tell_samplers(part, epoch)
    given = loader.given if isinstance(loader, SeededDataLoader) else loader
    if isinstance(given, DataLoader):
        _tell_epoch(epoch, *_samplers(given))


def _tell_epoch(epoch: int, *parts: Any) -> None:
    """Tell samplers and sets that have a `set_epoch` of their own, as distributed samplers do."""
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def _warn_of_replay(name: str, batches: int) -> None:
    warnings.warn(
        f"{name} can't say where it is: its first {batches} batches are read again to resume. That is exact only if it "
        "gives the same batches each time. A map-style DataLoader or a footplate.data.Loader resumes at once and exactly.",
        stacklevel=3,
    )
