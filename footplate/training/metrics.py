"""What `self.log` collects.

The one idea: logging copies the value on its device, since the user may change it in place, and waits for nothing. The
copy stays there until somebody needs the number (every `log_every_n_steps`, at the end of an epoch, or when a callback
asks), and is then read together with all that waited with it, in one transfer. Sums over an epoch are kept in float64 on
the host and are added in the order of the steps, so that they don't depend on when they were read: a resumed epoch ends
with the very same mean.

    log("loss", tensor)  →  entry.latest = copy, entry.waiting += [copy]
    step_values()        →  {"loss": 0.31}                     reads the latest of each
    epoch_values()       →  {"loss": 0.35}                     reads all that wait, reduces, starts anew

With several ranks, an epoch's totals of all names are exchanged at once, names and all, so that ranks may log different
ones; what is reduced is the same number on every rank. The latest value of a step is this rank's own, unless it was
logged with `sync_dist=True`: those are averaged when the step is reported.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from footplate.core.device_scalar import DeviceScalar
from footplate.core.errors import ConfigError
from footplate.distributed.group import ALONE, Group
from footplate.distributed.metric_reduction import Part, extreme, gathered, merge, reduced
from footplate.distributed.replica_logs import Logged
from footplate.hardware.transfer import batch_rows

CPU = torch.device("cpu")
REDUCTIONS = ("mean", "sum", "min", "max")
READ_AFTER = 1024  # values that may wait on the device before they are read, whatever the log interval


@dataclass(slots=True)
class Entry:
    """One logged name: how it is reported and what has been collected of it."""

    name: str
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    reduce_fx: str | Callable[[Tensor], Tensor]
    sync_dist: bool
    metric: Any = None  # a torchmetrics object, which accumulates by itself
    latest: Any = None
    synced: float | None = None  # the latest over all ranks, with sync_dist
    waiting: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)  # numbers, or tensors of one element on any device
    total: float = 0.0
    weight: float = 0.0
    values: list[float] = field(default_factory=list)  # only for a reduction given as a function
    loaders: set[int] = field(default_factory=set)  # of an evaluation, in whose batches it was logged
    computed: int = 0  # updates of the torchmetrics object that an epoch's value has been computed of

    @property
    def step_name(self) -> str:
        return self._ending_in("_step") if self.on_epoch else self.name

    @property
    def epoch_name(self) -> str:
        return self._ending_in("_epoch") if self.on_step else self.name

    def _ending_in(self, ending: str) -> str:
        """The name with an ending, before the loader's index, where it has one."""
        name, mark, index = self.name.partition("/dataloader_idx_")
        return f"{name}{ending}{mark}{index}"

    @property
    def has_latest(self) -> bool:
        if self.metric is None:
            return self.latest is not None
        return self.updates > 0 and getattr(self.metric, "_forward_cache", None) is not None

    def read(self) -> list[float]:
        """Bring what waits to the host, add it to the epoch, and return it in the order of logging."""
        if not self.waiting:
            return []
        values = to_floats(self.waiting, self.name)
        for value, weight in zip(values, to_floats(self.weights, self.name), strict=True):
            if self.reduce_fx == "mean":
                self.total += value * weight if weight else 0.0  # a mean over nothing is NaN, and counts for nothing
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
        """How often the torchmetrics object has been updated since an epoch's value was computed; 1 where there is none."""
        count = getattr(self.metric, "_update_count", 1)
        return 0 if count == self.computed else count

    def part(self) -> Part:
        """What has been collected in this epoch."""
        self.read()
        return Part(self.total, self.weight, self.values)

    def reset(self) -> None:
        self.total = self.weight = 0.0
        self.values = []
        self.computed = getattr(self.metric, "_update_count", 0)


class MetricLog:
    """The metrics of one loop: training, validation, testing or prediction.

    Attributes:
        by_step: whether a call that says neither `on_step` nor `on_epoch` comes from a training batch.
        batch: the batch in progress, from which a weight is taken when `batch_size` is not given.
        dataloader_idx: which of several evaluation loaders is running; None when there is only one.
        counts: whether the batch in progress counts; not where its rows are another rank's.
    """

    _apart: Mapping[int, list[Logged]] = {}  # by thread, while copies of the module train side by side

    def __init__(self, module: nn.Module, by_step: bool, group: Group = ALONE) -> None:
        self.by_step = by_step
        self.counts = True
        self._group = group
        self.batch: Any = None
        self._unfinished: list[Entry] | None = None  # for each value of a batch in training, the entry that has it
        self.dataloader_idx: int | None = None
        self._module = module
        self._entries: dict[str, Entry] = {}
        self._restored: dict[str, dict[str, Any]] = {}
        self._of_other_ranks: list[Any] = []  # torchmetrics objects that only other ranks have logged in this epoch

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Tensor], Tensor] = "mean",
        sync_dist: bool = False,
        add_dataloader_idx: bool = True,
        batch_size: float | Tensor | None = None,
    ) -> None:
        """See `footplate.Module.log`."""
        if type(value) is dict:  # each of its items is logged by itself
            for key, item in value.items():
                self.log(f"{name}.{key}", item, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist,
                         add_dataloader_idx, batch_size)  # fmt: skip
            return
        if self._apart and (calls := self._apart.get(threading.get_ident())) is not None:
            calls.append(
                Logged(name, _kept(name, value), prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist,
                       add_dataloader_idx, batch_size)
            )  # fmt: skip
            return
        if self.dataloader_idx is not None and add_dataloader_idx:
            name = f"{name}/dataloader_idx_{self.dataloader_idx}"
        entry = self._entries.get(name)
        if entry is None:
            entry = self._register(name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist)
        if self.dataloader_idx is not None:
            entry.loaders.add(self.dataloader_idx)
        if entry.metric is not None:
            return
        entry.latest = value = _own(value)
        if entry.on_epoch and self.counts:
            if len(entry.waiting) >= READ_AFTER:
                entry.read()  # before the value is added: `take_back` can undo what still waits
            entry.waiting.append(value)
            entry.weights.append(self._weight(entry, batch_size))
            if self._unfinished is not None:
                self._unfinished.append(entry)

    def begin_batch(self, batch: Any) -> None:
        """A batch is trained from here to `end_batch`, and what it logs can be taken back until then."""
        self.batch = batch
        self._unfinished = []

    def end_batch(self) -> None:
        """The batch in progress has been trained, so what it has logged stays."""
        self._unfinished = None

    def take_back(self) -> None:
        """Undo what the unfinished batch has added to the epoch: a run that continues from here repeats that batch.

        A torchmetrics object has been updated by then, which can't be undone.
        """
        for entry in self._unfinished or ():
            if entry.waiting:  # unless somebody has read them meanwhile
                entry.waiting.pop()
                entry.weights.pop()
        self._unfinished = None

    @contextlib.contextmanager
    def apart(self, threads: Sequence[int]) -> Iterator[list[list[Logged]]]:
        """Keep what is logged in some threads, by their identifiers, in a list for each, and do nothing else with it."""
        calls: dict[int, list[Logged]] = {thread: [] for thread in threads}
        self._apart = calls
        try:
            yield list(calls.values())
        finally:
            del self._apart

    def step_values(self, sync: bool = False) -> Values:
        """The latest value of every name that is reported by step, all read together.

        Args:
            sync: take those that were logged with `sync_dist` over all ranks; then all ranks must call this.
        """
        entries = [entry for entry in self._entries.values() if entry.on_step and entry.has_latest]
        latest = (entry.latest if entry.metric is None else entry.metric._forward_cache for entry in entries)
        values = to_floats(latest)
        over_ranks = any(entry.sync_dist for entry in entries)
        if sync:  # a rank that has logged none of them yet gathers with the others
            over_ranks = bool(self._group.maximum([int(over_ranks)])[0])
        if self._group.is_distributed and over_ranks:
            values = self._over_ranks(entries, values, sync)
        result = Values()
        for entry, value in zip(entries, values, strict=True):
            result.add(entry, entry.step_name, value)
        return result

    def epoch_values(self) -> Values:
        """Reduce every name that is reported by epoch, and start to collect again.

        A torchmetrics object keeps its state for the hooks that follow, until `reset_metrics`.
        """
        result = Values()
        mine = {entry.name: self._summary(entry) for entry in self._entries.values() if entry.on_epoch}
        everyone = self._group.gather(mine)
        for name in dict.fromkeys(name for summaries in everyone for name in summaries):
            found = [summaries[name] for summaries in everyone if name in summaries]
            entry = self._entries.get(name) or found[0].entry()
            entry.loaders = set().union(*(summary.loaders for summary in found))
            if sum(summary.updates for summary in found) == 0:
                continue
            if found[0].is_metric:
                value = self._compute(entry, found)
            else:
                value = reduced(entry.reduce_fx, merge(entry.reduce_fx, [summary.part for summary in found]))
            entry.reset()
            entry.latest = None  # from here on, the plain name means the epoch's value
            if value is not None:
                result.add(entry, entry.epoch_name, value)
        return result

    def forget_latest(self) -> None:
        """Forget the values of the last step: the plain names mean those of the epoch."""
        for entry in self._entries.values():
            entry.latest = None

    def reset_metrics(self) -> None:
        """Reset the torchmetrics objects that were logged, those reported by step alone too, as Lightning does."""
        for entry in self._entries.values():
            if entry.metric is not None:
                entry.metric.reset()
                entry.computed = 0
        for metric in self._of_other_ranks:
            metric.reset()
        self._of_other_ranks.clear()

    def clear(self) -> None:
        """Forget everything: names, values and options."""
        self._entries.clear()
        self._restored.clear()

    def names(self) -> Iterator[str]:
        """Every name that has been logged."""
        return iter(self._entries)

    def state_dict(self) -> dict[str, Any]:
        """What has been collected so far in this epoch, in plain values."""
        return {name: self._entry_state(entry) for name, entry in self._entries.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`. A name whose reduction is a function continues when it is logged next."""
        self.clear()
        for name, saved in state.items():
            if saved["reduce_fx"] is None:
                self._restored[name] = saved
                continue
            metric = self._module.get_submodule(saved["metric"]) if saved["metric"] else None
            options = {
                key: saved[key] for key in ("on_step", "on_epoch", "prog_bar", "logger", "reduce_fx", "sync_dist")
            }
            entry = Entry(name, metric=metric, latest=saved["latest"], **options)
            self._restore(entry, saved)
            self._entries[name] = entry

    def _register(
        self, name: str, value: Any, prog_bar: bool, logger: bool | None, on_step: bool | None, on_epoch: bool | None,
        reduce_fx: str | Callable[[Tensor], Tensor], sync_dist: bool,
    ) -> Entry:  # fmt: skip
        metric = value if _is_metric(value) else None
        if metric is None:
            _check_value(name, value)
        reduce_fx = _known_reduction(name, reduce_fx)
        if on_step is None:
            on_step = self.by_step if on_epoch is None or not self.by_step else True
        if on_epoch is None:
            on_epoch = not self.by_step
        entry = Entry(name, on_step, on_epoch, prog_bar, logger is not False, reduce_fx, sync_dist, metric)
        if name in self._restored:
            self._restore(entry, self._restored.pop(name))
        self._entries[name] = entry
        return entry

    def _weight(self, entry: Entry, batch_size: float | Tensor | None) -> float | Tensor:
        if isinstance(batch_size, Tensor):
            return _own(batch_size)
        if batch_size is not None:
            return float(batch_size)
        return float(batch_rows(self.batch)) if entry.reduce_fx == "mean" and self.batch is not None else 1.0

    def _summary(self, entry: Entry) -> Summary:
        options = (
            entry.on_step,
            entry.on_epoch,
            entry.prog_bar,
            entry.logger,
            _plain(entry.reduce_fx),
            entry.sync_dist,
        )
        return Summary(
            entry.name, options, entry.part(), entry.metric is not None, self._metric_path(entry), entry.updates,
            _items(entry.metric), entry.loaders,
        )  # fmt: skip

    def _compute(self, entry: Entry, found: list[Summary]) -> float | None:
        """The value of a torchmetrics object, which gathers its own states: so all ranks ask it, or none."""
        metric: Any = entry.metric
        if metric is None and found[0].path:
            metric = entry.metric = self._module.get_submodule(found[0].path)  # this rank had no batch to log it in
            self._of_other_ranks.append(metric)
        if metric is None:
            return None
        alone = len(found) < self._group.world.size and not found[0].path
        own, synced = {name: getattr(metric, name) for name in metric._defaults}, metric._to_sync
        if not alone and _differs(metric, [summary.items for summary in found], self._group.world.size):
            states = self._group.gather({name: _to_device(value, CPU) for name, value in own.items()})
            for name, value in gathered(states, metric._reductions).items():
                setattr(metric, name, _to_device(value, metric.device))
            alone = True
        metric._to_sync = synced and not alone
        try:
            return float(metric.compute())
        finally:
            metric._to_sync = synced
            for name, value in own.items():
                setattr(metric, name, value)

    def _over_ranks(self, entries: list[Entry], values: list[float], sync: bool) -> list[float]:
        """The values of a step, those with `sync_dist` reduced over the ranks that have them: now, or as they last were."""
        if sync:
            mine = {entry.name: value for entry, value in zip(entries, values, strict=True) if entry.sync_dist}
            everyone = self._group.gather(mine)
            for entry in entries:
                if entry.sync_dist:
                    kind = _plain(entry.reduce_fx) or "mean"
                    found = [Part(ranks[entry.name], 1.0) for ranks in everyone if entry.name in ranks]
                    entry.synced = reduced(kind, merge(kind, found))
        pairs = zip(entries, values, strict=True)
        return [value if entry.synced is None else entry.synced for entry, value in pairs]

    def _metric_path(self, entry: Entry) -> str:
        if entry.metric is None:
            return ""
        return next((path for path, module in self._module.named_modules() if module is entry.metric), "")

    def _entry_state(self, entry: Entry) -> dict[str, Any]:
        entry.read()
        metric_path = self._metric_path(entry)
        metric_state: dict[str, Any] = {}
        if entry.metric is not None:
            states = {key: getattr(entry.metric, key) for key in entry.metric._defaults}
            # A reset empties the metric's lists in place, so the state needs lists of its own.
            metric_state = {key: list(value) if isinstance(value, list) else value for key, value in states.items()}
            metric_state["_update_count"] = entry.metric._update_count
        return {
            "on_step": entry.on_step,
            "on_epoch": entry.on_epoch,
            "prog_bar": entry.prog_bar,
            "logger": entry.logger,
            "reduce_fx": _plain(entry.reduce_fx),
            "sync_dist": entry.sync_dist,
            "metric": metric_path,
            "metric_state": metric_state,
            "latest": None if entry.latest is None else float(entry.latest),
            "total": entry.total,
            "weight": entry.weight,
            "values": list(entry.values),
        }

    @staticmethod
    def _restore(entry: Entry, saved: dict[str, Any]) -> None:
        entry.total, entry.weight, entry.values = saved["total"], saved["weight"], list(saved["values"])
        if entry.metric is not None:
            for key, value in saved["metric_state"].items():
                setattr(entry.metric, key, _to_device(value, entry.metric.device) if key != "_update_count" else value)


@dataclass(frozen=True)
class Summary:
    """What a rank tells the others of a name at the end of an epoch."""

    name: str
    options: tuple[Any, ...]
    part: Part
    is_metric: bool
    path: str  # of the torchmetrics object, in the module
    updates: int
    items: dict[str, int]  # of the torchmetrics object: how many tensors each state has that is a list
    loaders: set[int]

    def entry(self) -> Entry:
        """An entry for a name that only other ranks have logged."""
        return Entry(self.name, *self.options)


@dataclass
class Values:
    """Read metrics by name: for callbacks (under the plain name too), for loggers, and for the progress display.

    Attributes:
        callback: under the plain name too.
        logger: without those that were logged with `logger=False`.
        progress: those that were logged with `prog_bar=True`.
        results: each under its own name alone, as an evaluation returns them.
        loaders: by name, in which loaders' batches it was logged; without those that several loaders share.
    """

    callback: dict[str, float] = field(default_factory=dict)
    logger: dict[str, float] = field(default_factory=dict)
    progress: dict[str, float] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    loaders: dict[str, set[int]] = field(default_factory=dict)

    def add(self, entry: Entry, name: str, value: float) -> None:
        """Take in the value of an entry."""
        self.results[name] = value
        if entry.loaders:
            self.loaders[name] = entry.loaders
        self.callback[entry.name] = self.callback[name] = value
        if entry.logger:
            self.logger[name] = value
        if entry.prog_bar:
            self.progress[name] = value

    def update(self, other: Values) -> None:
        """Take in all of another."""
        self.callback.update(other.callback)
        self.logger.update(other.logger)
        self.progress.update(other.progress)
        self.results.update(other.results)
        self.loaders.update(other.loaders)


def to_floats(values: Iterable[Any], name: str = "a metric") -> list[float]:
    """Host floats of numbers and one-element tensors, with one transfer per device and type."""
    values = list(values)
    result: list[float] = [0.0] * len(values)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    later: dict[type[DeviceScalar], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            groups.setdefault((value.device, value.dtype), []).append(index)
        elif isinstance(value, DeviceScalar):
            later.setdefault(type(value), []).append(index)
        else:
            result[index] = float(value)
    for kind, indices in later.items():
        for index, number in zip(indices, kind.read([values[index] for index in indices]), strict=True):
            result[index] = number
    for indices in groups.values():
        tensors = [values[index] for index in indices]
        if any(tensor.ndim for tensor in tensors):
            tensors = [tensor.reshape(()) if tensor.numel() == 1 else tensor for tensor in tensors]
        try:
            numbers = [float(number) for number in torch.stack(tensors).tolist()]
        except (RuntimeError, TypeError):
            raise ConfigError(
                f'self.log("{name}", …): every value must be one number, got a tensor of several.'
            ) from None
        for index, number in zip(indices, numbers, strict=True):
            result[index] = number
    return result


def _known_reduction(name: str, reduce_fx: str | Callable[[Tensor], Tensor]) -> str | Callable[[Tensor], Tensor]:
    """The name of a reduction; or the function, where it is somebody's own."""
    if callable(reduce_fx):
        return reduce_fx.__name__ if reduce_fx in (torch.mean, torch.sum, torch.min, torch.max) else reduce_fx
    known = {"avg": "mean"}.get(reduce_fx.lower(), reduce_fx.lower())
    if known not in REDUCTIONS:
        raise ConfigError(
            f'self.log("{name}", reduce_fx="{reduce_fx}"): expected {", ".join(REDUCTIONS)} or a function.'
        )
    return known


def _plain(reduce_fx: Any) -> Any:
    """A reduction by its name; None for a function, which can't be told to others."""
    return reduce_fx if isinstance(reduce_fx, str) else None


def _check_value(name: str, value: Any) -> None:
    if not isinstance(value, (int, float, Tensor)) and not hasattr(value, "__float__"):
        raise ConfigError(
            f'self.log("{name}", …): expected a number, a one-element tensor, a torchmetrics Metric or a dict of '
            f"these, got {type(value).__name__}."
        )
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(
            f'self.log("{name}", …): a tensor of shape {tuple(value.shape)} is not one number. '
            f"Log its .mean(), or its items under names of their own."
        )


def _own(value: Any) -> Any:
    """A value as it is now, whatever its owner does to it later: a copy on its device, or a number."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if isinstance(value, DeviceScalar) else float(value)


def _kept(name: str, value: Any) -> Any:
    """What one of several copies of a module logs, for later."""
    if _is_metric(value):
        raise ConfigError(
            f'self.log("{name}", …): with strategy="replicas" each device has a copy of this torchmetrics object, which '
            'knows its own rows alone. Log a plain value, or use strategy="ddp".'
        )
    _check_value(name, value)
    return _own(value)


def _is_metric(value: Any) -> bool:
    return isinstance(value, nn.Module) and hasattr(value, "compute") and hasattr(value, "reset")


def _items(metric: Any) -> dict[str, int]:
    states = {name: getattr(metric, name) for name in getattr(metric, "_defaults", ())}
    return {name: len(value) for name, value in states.items() if isinstance(value, list)}


def _differs(metric: Any, items: list[dict[str, int]], ranks: int) -> bool:
    """Whether the ranks' lists are such that torchmetrics, which gathers them tensor by tensor, would wait for one that a
    rank hasn't got. Those that gather in a way of their own are left to it.
    """
    nested = any(part is not metric and hasattr(part, "_defaults") for part in metric.modules())
    if nested or type(metric)._sync_dist.__qualname__ != "Metric._sync_dist":
        return False
    items = [*items, *[{}] * (ranks - len(items))]
    for name in dict.fromkeys(name for one in items for name in one):
        counts = {one.get(name, 0) for one in items}
        joined = "cat" in getattr(metric._reductions[name], "__name__", "")  # to one tensor before it is gathered
        if len(counts) > 1 and (not joined or 0 in counts):
            return True
    return False


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_to_device(item, device) for item in value]
    return value.to(device) if isinstance(value, Tensor) else value
