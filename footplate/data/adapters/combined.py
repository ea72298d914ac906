"""Several loaders as one: which batches of theirs make a batch, and where each of them is.

    {"a": loader of 2 batches, "b": loader of 3}       mode             batches
                                                       min_size         {a0 b0} {a1 b1}
                                                       max_size_cycle   {a0 b0} {a1 b1} {a0 b2}
                                                       max_size         {a0 b0} {a1 b1} {None b2}
                                                       sequential       a0 a1 b0 b1 b2

The names and modes are Lightning's. A dict, list or tuple of loaders, nested or not, trains as `max_size_cycle` and is
evaluated as `sequential`; `CombinedLoader` names another mode.

In training, each loader has its place of its own: the pass of the epoch it is in (`max_size_cycle` makes several) and the
batch. Pass k of epoch e has the order of epoch `e + k * 2**20`, so that it is shuffled differently and depends on nothing
that went before. A run that continues goes on in each loader where that was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Iterable as IterableType
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from footplate.core.errors import CheckpointError, ConfigError, DataError
from footplate.distributed.uneven_loaders import close

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
MODES = ("min_size", "max_size_cycle", "max_size", "sequential")

_PASS = 1 << 20  # epochs between two passes over a loader in one epoch
_END = object()

Build = Callable[[Iterator[Any]], Any]


class CombinedLoader:
    """Loaders whose batches make one batch, or follow one another.

    Iterating gives `(batch, batch_idx, dataloader_idx)`, as Lightning's class of that name does. A trainer gives the batch
    to your step.

    Args:
        iterables: a dict, list or tuple of loaders, nested or not.
        mode: "min_size" ends with the shortest loader; "max_size_cycle" with the longest, and begins the others again;
            "max_size" with the longest, and has None for those that have ended; "sequential" takes one loader after
            another.

    Raises:
        ConfigError: another mode.
    """

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        if mode not in MODES:
            raise ConfigError(f"CombinedLoader(mode={mode!r}): expected one of {', '.join(MODES)}.")
        self.iterables = iterables
        self.mode: Mode = mode

    @property
    def flattened(self) -> list[Any]:
        """The loaders, in order."""
        return flatten(self.iterables)[0]

    def __len__(self) -> int:
        leaves, build = flatten(self.iterables)
        return len(Combination(leaves, build, self.mode))

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        leaves, build = flatten(self.iterables)
        if self.mode != "sequential":
            for batch_idx, batch in enumerate(Combination(leaves, build, self.mode)):
                yield batch, batch_idx, 0
            return
        for index, leaf in enumerate(leaves):
            for batch_idx, batch in enumerate(leaf):
                yield batch, batch_idx, index


def is_combined(loader: Any) -> bool:
    """Whether a loader is a `CombinedLoader`, ours or Lightning's."""
    return isinstance(loader, CombinedLoader) or any(
        kind.__name__ == "CombinedLoader" and hasattr(loader, "_mode") for kind in type(loader).__mro__
    )


def mode_of(loader: Any, default: Mode) -> Mode:
    """The mode of a `CombinedLoader`, ours or Lightning's; `default` of any other collection."""
    if not is_combined(loader):
        return default
    return loader.mode if isinstance(loader, CombinedLoader) else loader._mode


def holds_loaders(thing: Any) -> bool:
    """Whether something that was given to train on is several loaders, and not one, such as a list of batches."""
    return is_combined(thing) or isinstance(thing, Mapping) or _any_loader(thing)


def _any_loader(thing: Any) -> bool:
    """Whether there is a loader in a collection, however deep. A batch is a collection, too, and has none."""
    parts = thing.values() if isinstance(thing, Mapping) else thing if isinstance(thing, (list, tuple)) else ()
    return any(_is_loader(part) or _any_loader(part) for part in parts)


def _is_loader(thing: Any) -> bool:
    if isinstance(thing, DataLoader) or hasattr(thing, "set_epoch") or is_combined(thing):
        return True
    batch = (
        isinstance(thing, (Tensor, np.ndarray, Sequence, Mapping, set)) or hasattr(thing, "to") or is_dataclass(thing)
    )
    return isinstance(thing, IterableType) and not batch


def loaders_of(given: Any) -> list[Any]:
    """The loaders that an evaluation goes through one after another, of whatever was given."""
    if given is None:
        return []
    if is_combined(given) and mode_of(given, "sequential") != "sequential":
        return [given]
    return leaves_of(given)


def leaves_of(given: Any) -> list[Any]:
    """Every loader in what was given."""
    if isinstance(given, (list, tuple, Mapping)) or is_combined(given):
        return flatten(given)[0]
    return [given]


def flatten(given: Any) -> tuple[list[Any], Build]:
    """The loaders of a collection, and the function that puts as many values in their places."""
    if is_combined(given):
        given = given.iterables
    if isinstance(given, (list, tuple, Mapping)):
        return _flatten_node(given)
    return [given], next


def _flatten_node(node: Any) -> tuple[list[Any], Build]:
    keys = list(node) if isinstance(node, Mapping) else range(len(node))
    children = [_flatten_node(node[key]) if _is_node(node[key]) else ([node[key]], next) for key in keys]

    def build(values: Iterator[Any]) -> Any:
        built = [make(values) for _, make in children]
        if isinstance(node, Mapping):
            return dict(zip(keys, built, strict=True))
        return type(node)(*built) if hasattr(node, "_fields") else type(node)(built)

    return [leaf for leaves, _ in children for leaf in leaves], build


def _is_node(thing: Any) -> bool:
    return not is_combined(thing) and holds_loaders(thing)


@dataclass
class Place:
    """Where one loader is in the present epoch.

    Attributes:
        passes: how often it was begun again.
        batch: how many batches of this pass were handed out.
        before: how many batches the pass before had.
        ended: it has no more.
    """

    passes: int = 0
    batch: int = 0
    before: int = 0
    ended: bool = False


class Combination:
    """The batches of several loaders, combined; each iteration begins with their first.

    Args:
        parts: the loaders.
        build: makes a batch of one value of each.
        mode: see `CombinedLoader`.
    """

    def __init__(self, parts: list[Any], build: Build, mode: Mode) -> None:
        if not parts:
            raise ConfigError("A collection of loaders holds no loader.")
        self.parts = parts
        self.mode: Mode = mode
        self._build = build
        self._batch = 0
        self._places = [Place() for _ in parts]

    def __len__(self) -> int:
        sizes = [_size(part) for part in self.parts]
        total = {"min_size": min, "sequential": sum}.get(self.mode, max)(sizes)
        if math.isinf(total):
            raise TypeError("the number of batches of a combined loader isn't known")
        return int(total)

    def __iter__(self) -> Iterator[Any]:
        self._batch, self._places = 0, [Place() for _ in self.parts]
        return self._iterate()

    def weight(self, batch: int, weights: Sequence[Callable[[int], float] | None]) -> float:
        """How much this rank's share of a batch of the epoch counts: the mean over the loaders that have a part in it.

        Args:
            batch: its index.
            weights: for each loader the weight of its batches, by their index.
        """
        sizes = [_size(part) for part in self.parts]
        if self.mode == "sequential":
            index = 0
            while batch >= sizes[index]:
                batch, index = batch - int(sizes[index]), index + 1
            return _weight(weights[index], batch)
        present = [
            _weight(weight, batch % int(size) if batch >= size else batch)
            for weight, size in zip(weights, sizes, strict=True)
            if self.mode == "max_size_cycle" or batch < size
        ]
        return sum(present) / len(present)

    def _iterate(self) -> Iterator[Any]:
        return self._one_after_another() if self.mode == "sequential" else self._side_by_side()

    def _one_after_another(self) -> Iterator[Any]:
        for index, place in enumerate(self._places):
            if place.ended:
                continue
            batches = self._open(index)
            try:
                for batch in batches:
                    place.batch += 1
                    self._batch += 1
                    yield batch
            finally:
                close(batches)
            place.ended = True

    def _side_by_side(self) -> Iterator[Any]:
        iterators = [iter(()) if place.ended else self._open(index) for index, place in enumerate(self._places)]
        try:
            while True:
                values = []
                for index in range(len(iterators)):
                    value = self._take(index, iterators)
                    if value is _END:
                        return
                    values.append(value)
                if all(place.ended for place in self._places):
                    return
                self._batch += 1
                yield self._build(iter(values))
        finally:
            for iterator in iterators:
                close(iterator)

    def _take(self, index: int, iterators: list[Iterator[Any]]) -> Any:
        """The next batch of a loader, None where it has ended and the others go on, or `_END` where all end."""
        place = self._places[index]
        if place.ended:
            return None
        value = next(iterators[index], _END)
        if value is _END and self.mode == "max_size":
            place.ended = True
            return None
        if value is _END:
            others = (other for other in self._places if other is not place)
            if self.mode == "min_size" or all(other.passes for other in others):
                return _END
            close(iterators[index])
            place.before, place.batch, place.passes = place.batch, 0, place.passes + 1
            iterators[index] = self._open(index)
            value = next(iterators[index], _END)
            if value is _END:
                raise DataError(f"Loader {index} of a combined loader gave no batch when it was begun again.")
        place.batch += 1
        return value

    def _open(self, index: int) -> Iterator[Any]:
        return iter(self.parts[index])


class TrainingCombination(Combination):
    """A combination that knows its place in an epoch, and goes on there.

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
            self._batch, self._places = 0, [Place() for _ in self.parts]
        self._restored = False
        return self._iterate()

    @property
    def skipped(self) -> int:
        """Rows that could not be read and were left out."""
        return sum(getattr(part, "skipped", 0) for part in self.parts)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is next; from its beginning, unless it is the one that was restored."""
        if epoch != self._epoch or not self._restored:
            self._epoch, self._batch, self._places = epoch, 0, [Place() for _ in self.parts]
            self._restored = False
        for part, place in zip(self.parts, self._places, strict=True):
            part.set_epoch(_number(epoch, place.passes))

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many batches of it have been handed out, and the place of each loader."""
        parts = [
            {**asdict(place), "state": part.state_dict()} for place, part in zip(self._places, self.parts, strict=True)
        ]
        return {"epoch": self._epoch, "batch": self._batch, "mode": self.mode, "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after those batches.

        Raises:
            CheckpointError: the state is of another combination.
        """
        saved = state.get("parts", [])
        if len(saved) != len(self.parts) or state.get("mode") != self.mode:
            raise CheckpointError(
                f"The checkpoint was made with {len(saved) or 'no'} combined loader(s) "
                f"(mode={state.get('mode')}), this run has {len(self.parts)} (mode={self.mode}). Use the same to resume."
            )
        self._epoch, self._batch, self._restored = state["epoch"], state["batch"], True
        self._places = [Place(*(part[name] for name in ("passes", "batch", "before", "ended"))) for part in saved]
        for part, found in zip(self.parts, saved, strict=True):
            part.load_state_dict(found["state"])

    def _open(self, index: int) -> Iterator[Any]:
        part, place = self.parts[index], self._places[index]
        if place.passes and not place.batch:
            part.set_epoch(_number(self._epoch, place.passes))
        return iter(part)


def rewound(state: dict[str, Any], batch: int) -> dict[str, Any]:
    """The state of a `TrainingCombination` when it had handed out fewer batches of the same epoch.

    Args:
        state: its present one.
        batch: how many it had handed out.

    Raises:
        CheckpointError: a loader keeps its position itself and can't be put back.
    """
    back, parts = state["batch"] - batch, []
    for part in reversed(state["parts"]) if state["mode"] == "sequential" else state["parts"]:
        passes, here, ended = part["passes"], part["batch"], part["ended"]
        if state["mode"] == "sequential":
            gone = min(back, here)
            here, back, ended = here - gone, back - gone, ended and not gone
        elif ended or state["mode"] == "max_size":
            here, ended = min(here, batch), ended and here <= batch
        elif here >= back:
            here -= back
        else:
            passes, here = passes - 1, part["before"] + here - back
        parts.append(_moved(part, passes, here, ended, state["epoch"]))
    if state["mode"] == "sequential":
        parts.reverse()
    return {**state, "batch": batch, "parts": parts}


def _moved(part: dict[str, Any], passes: int, batch: int, ended: bool, epoch: int) -> dict[str, Any]:
    """The state of one loader of a combination, put back to an earlier place."""
    if (passes, batch, ended) == (part["passes"], part["batch"], part["ended"]):
        return part
    own = part["state"]
    if "own" in own or ("parts" in own and passes != part["passes"]):
        raise CheckpointError(
            "A loader of a combined loader has handed out a batch that was not trained on, and can't take it back."
        )
    own = rewound(own, batch) if "parts" in own else {**own, "batch": batch, "epoch": _number(epoch, passes)}
    return {**part, "passes": passes, "batch": batch, "ended": ended, "state": own}


def _number(epoch: int, passes: int) -> int:
    return epoch + passes * _PASS


def _size(part: Any) -> float:
    try:
        return len(part)
    except (TypeError, NotImplementedError):
        return math.inf


def _weight(weight: Callable[[int], float] | None, batch: int) -> float:
    return 1.0 if weight is None else weight(batch)
