"""A logged name: its options, the values that an epoch has collected, and the values that are reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from footplate.distributed.metric_reduction import Part, extreme
from footplate.training.metrics.host_values import to_floats


@dataclass(slots=True)
class Entry:
    """A logged name, with its options and values."""

    name: str
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    reduce_fx: str | Callable[[Tensor], Tensor]
    sync_dist: bool
    # A torchmetrics object, which does its own accumulation.
    metric: Any = None
    latest: Any = None
    # The latest value over all ranks, with sync_dist.
    synced: float | None = None
    waiting: list[Any] = field(default_factory=list)
    # Numbers, or tensors of one element on any device.
    weights: list[Any] = field(default_factory=list)
    total: float = 0.0
    weight: float = 0.0
    # All values, only if the reduction is a function.
    values: list[float] = field(default_factory=list)
    # Loaders of an evaluation whose batches logged the name.
    loaders: set[int] = field(default_factory=set)
    # The number of updates of the torchmetrics object that an epoch's value already contains.
    computed: int = 0

    @property
    def step_name(self) -> str:
        return self._ending_in("_step") if self.on_epoch else self.name

    @property
    def epoch_name(self) -> str:
        return self._ending_in("_epoch") if self.on_step else self.name

    def _ending_in(self, ending: str) -> str:
        """Return the name with an ending. The ending comes before the loader's index, if there is one."""
        name, mark, index = self.name.partition("/dataloader_idx_")
        return f"{name}{ending}{mark}{index}"

    @property
    def has_latest(self) -> bool:
        if self.metric is None:
            return self.latest is not None
        return self.updates > 0 and getattr(self.metric, "_forward_cache", None) is not None

    def read(self) -> list[float]:
        """Read the waiting values, add them to the epoch, and return them in the order of logging."""
        if not self.waiting:
            return []
        values = to_floats(self.waiting, self.name)
        for value, weight in zip(values, to_floats(self.weights, self.name), strict=True):
            if self.reduce_fx == "mean":
                # A mean over no rows is NaN, and must not count.
                self.total += value * weight if weight else 0.0
                self.weight += weight
            elif self.reduce_fx == "sum":
                self.total += value
                self.weight = 1.0
            elif self.reduce_fx in ("min", "max"):
                self.total = extreme(str(self.reduce_fx), self.total if self.weight else value, value)
                self.weight = 1.0
            else:
                self.values.append(value)
        self.waiting.clear()
        self.weights.clear()
        return values

    @property
    def updates(self) -> int:
        """The number of updates of the torchmetrics object since the last epoch's value. 1 for other values."""
        count = getattr(self.metric, "_update_count", 1)
        return 0 if count == self.computed else count

    def part(self) -> Part:
        """Return what this epoch has collected."""
        self.read()
        return Part(self.total, self.weight, self.values)

    def reset(self) -> None:
        self.total = self.weight = 0.0
        self.values = []
        self.computed = getattr(self.metric, "_update_count", 0)


@dataclass(frozen=True)
class Summary:
    """A rank's message to the other ranks about a name, at the end of an epoch."""

    name: str
    options: tuple[Any, ...]
    part: Part
    is_metric: bool
    # The path of the torchmetrics object in the module.
    path: str
    updates: int
    # The number of tensors in each state of the torchmetrics object that is a list.
    items: dict[str, int]
    loaders: set[int]

    def entry(self) -> Entry:
        """Return an entry for a name that only other ranks have logged."""
        return Entry(self.name, *self.options)


@dataclass
class Values:
    """Metric values by name, for callbacks, loggers and the progress display.

    Attributes:
        callback: for callbacks, under the plain name too.
        logger: for loggers: all names but those logged with `logger=False`.
        progress: for the progress display: the names logged with `prog_bar=True`.
        results: each value under one name, as an evaluation returns them.
        loaders: for each name, the loaders in whose batches it was logged. Names that several loaders share are left out.
    """

    callback: dict[str, float] = field(default_factory=dict)
    logger: dict[str, float] = field(default_factory=dict)
    progress: dict[str, float] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    loaders: dict[str, set[int]] = field(default_factory=dict)

    def add(self, entry: Entry, name: str, value: float) -> None:
        """Add the value of an entry."""
        self.results[name] = value
        if entry.loaders:
            self.loaders[name] = entry.loaders
        self.callback[entry.name] = self.callback[name] = value
        if entry.logger:
            self.logger[name] = value
        if entry.prog_bar:
            self.progress[name] = value

    def update(self, other: Values) -> None:
        """Add all values of another object."""
        self.callback.update(other.callback)
        self.logger.update(other.logger)
        self.progress.update(other.progress)
        self.results.update(other.results)
        self.loaders.update(other.loaders)
