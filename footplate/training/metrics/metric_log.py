"""The metrics of one loop: collected while batches run, reported by step, reduced by epoch.

Logging copies the value on its device, since the user may change it in place later, and waits for nothing. The copy stays
there until a report needs the number: every `log_every_n_steps`, at the end of an epoch, or when a callback asks. Then all
waiting values are read in one transfer. Sums over an epoch are kept in float64 on the host, and added in the order of the
steps. They don't depend on when they were read, so a resumed epoch ends with the same mean.

    log("loss", tensor)  →  entry.latest = copy, entry.waiting += [copy]
    step_values()        →  {"loss": 0.31}                     reads the latest of each name
    epoch_values()       →  {"loss": 0.35}                     reads all waiting values, reduces, starts again

With several ranks, the totals of all names in an epoch are exchanged at once, together with the names, so ranks may log
different names. The reduced value is the same on every rank. The latest value of a step is this rank's own, unless it was
logged with `sync_dist=True`. Those values are averaged over the ranks when the step is reported.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from footplate.core.errors import ConfigError
from footplate.distributed.group import ALONE, Group
from footplate.distributed.metric_reduction import Part, gathered, merge, reduced
from footplate.distributed.replica_logs import Logged
from footplate.hardware.transfer import batch_rows
from footplate.training.metrics.entry import Entry, Summary, Values
from footplate.training.metrics.host_values import snapshot_value, to_floats
from footplate.training.metrics.logging_checks import check_value, known_reduction, reduction_name
from footplate.training.metrics.torchmetrics_objects import is_torchmetric, list_lengths, to_device, would_deadlock

CPU = torch.device("cpu")
# The most values of one name that may wait on the device before they are read, whatever the log interval.
READ_AFTER = 1024


class MetricLog:
    """The metrics of training, validation, testing or prediction.

    Attributes:
        by_step: True if a call that gives neither `on_step` nor `on_epoch` comes from a training batch.
        batch: the batch in progress. Its rows are the weight of a value that is logged without `batch_size`.
        dataloader_idx: the index of the running evaluation loader. None if there is only one.
        counts: False while the batch in progress doesn't count, since its rows belong to another rank.
    """

    # By thread, while copies of the module train side by side.
    _apart: Mapping[int, list[Logged]] = {}

    def __init__(self, module: nn.Module, by_step: bool, group: Group = ALONE) -> None:
        self.by_step = by_step
        self.counts = True
        self._group = group
        self.batch: Any = None
        # The entry of each value that the batch in progress has logged. None between batches.
        self._unfinished: list[Entry] | None = None
        self.dataloader_idx: int | None = None
        self._module = module
        self._entries: dict[str, Entry] = {}
        self._restored: dict[str, dict[str, Any]] = {}
        # Torchmetrics objects that only other ranks have logged in this epoch.
        self._of_other_ranks: list[Any] = []

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Collect a value. The options are the fields of `Logged`."""
        self.record(Logged(name, value, **options))

    def record(self, call: Logged) -> None:
        """Collect the value of a call of `self.log`."""
        name, value = call.name, call.value
        if type(value) is dict:
            for key, item in value.items():
                self.record(call._replace(name=f"{name}.{key}", value=item))
            return

        # A copy of the module on another device: `replica_logs.py` combines these calls later.
        if self._apart and (calls := self._apart.get(threading.get_ident())) is not None:
            calls.append(call._replace(value=_kept(name, value)))
            return

        if self.dataloader_idx is not None and call.add_dataloader_idx:
            name = f"{name}/dataloader_idx_{self.dataloader_idx}"
        entry = self._entries.get(name)
        if entry is None:
            entry = self._register(name, call)
        if self.dataloader_idx is not None:
            entry.loaders.add(self.dataloader_idx)
        if entry.metric is not None:
            return

        entry.latest = value = snapshot_value(value)
        if entry.on_epoch and self.counts:
            # Read before adding the value: `take_back` can only undo values that still wait.
            if len(entry.waiting) >= READ_AFTER:
                entry.read()
            entry.waiting.append(value)
            entry.weights.append(self._weight(entry, call.batch_size))
            if self._unfinished is not None:
                self._unfinished.append(entry)

    def enter(self, position: int | None) -> None:
        """Let values count for one of this process's logical ranks, of which there are none here."""

    def begin_batch(self, batch: Any) -> None:
        """Begin a training batch. Until `end_batch`, `take_back` can undo what it logs."""
        self.batch = batch
        self._unfinished = []

    def end_batch(self) -> None:
        """End a training batch: what it has logged stays."""
        self._unfinished = None

    def take_back(self) -> None:
        """Undo what the unfinished batch has added to the epoch, since a run that continues from here repeats that batch.

        A torchmetrics object has been updated by then, and this can't be undone.
        """
        for entry in self._unfinished or ():
            # Nothing waits if the values were read in the meantime.
            if entry.waiting:
                entry.waiting.pop()
                entry.weights.pop()
        self._unfinished = None

    @contextlib.contextmanager
    def apart(self, threads: Sequence[int]) -> Iterator[list[list[Logged]]]:
        """Keep what some threads log in one list a thread, and do nothing else with it.

        Args:
            threads: their identifiers.
        """
        calls: dict[int, list[Logged]] = {thread: [] for thread in threads}
        self._apart = calls
        try:
            yield list(calls.values())
        finally:
            del self._apart

    def step_values(self, sync: bool = False) -> Values:
        """Return the latest value of every name that is reported by step, read in one transfer.

        Args:
            sync: reduce names that were logged with `sync_dist` over the ranks. All ranks must call this then.
        """
        entries = [entry for entry in self._entries.values() if entry.on_step and entry.has_latest]
        latest = (entry.latest if entry.metric is None else entry.metric._forward_cache for entry in entries)
        values = to_floats(latest)
        over_ranks = any(entry.sync_dist for entry in entries)
        # A rank that has logged none of these names yet must gather too.
        if sync:
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
            of_ranks = [summaries[name] for summaries in everyone if name in summaries]
            entry = self._entries.get(name) or of_ranks[0].entry()
            entry.loaders = set().union(*(summary.loaders for summary in of_ranks))
            if sum(summary.updates for summary in of_ranks) == 0:
                continue
            if of_ranks[0].is_metric:
                value = self._compute(entry, of_ranks)
            else:
                value = reduced(entry.reduce_fx, merge(entry.reduce_fx, [summary.part for summary in of_ranks]))
            entry.reset()
            # From now on, the plain name gives the epoch's value.
            entry.latest = None
            if value is not None:
                result.add(entry, entry.epoch_name, value)
        return result

    def forget_latest(self) -> None:
        """Forget the values of the last step, so that the plain names are those of the epoch."""
        for entry in self._entries.values():
            entry.latest = None

    def reset_metrics(self) -> None:
        """Reset the torchmetrics objects that were logged, also those that are reported by step only, as Lightning does."""
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
        """Return what this epoch has collected so far, as plain values."""
        return {name: self._entry_state(entry) for name, entry in self._entries.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`. A name whose reduction is a function continues when it is logged again."""
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

    def _register(self, name: str, call: Logged) -> Entry:
        metric = call.value if is_torchmetric(call.value) else None
        if metric is None:
            check_value(name, call.value)
        reduce_fx = known_reduction(name, call.reduce_fx)

        # A call from a training batch reports by step, and any other call by epoch, unless it says otherwise.
        on_step, on_epoch = call.on_step, call.on_epoch
        if on_step is None:
            on_step = self.by_step if on_epoch is None or not self.by_step else True
        if on_epoch is None:
            on_epoch = not self.by_step

        logger = call.logger is not False
        entry = Entry(name, on_step, on_epoch, call.prog_bar, logger, reduce_fx, call.sync_dist, metric)
        if name in self._restored:
            self._restore(entry, self._restored.pop(name))
        self._entries[name] = entry
        return entry

    def _weight(self, entry: Entry, batch_size: float | Tensor | None) -> float | Tensor:
        if isinstance(batch_size, Tensor):
            return snapshot_value(batch_size)
        if batch_size is not None:
            return float(batch_size)
        return float(batch_rows(self.batch)) if entry.reduce_fx == "mean" and self.batch is not None else 1.0

    def _summary(self, entry: Entry) -> Summary:
        options = (
            entry.on_step,
            entry.on_epoch,
            entry.prog_bar,
            entry.logger,
            reduction_name(entry.reduce_fx),
            entry.sync_dist,
        )
        return Summary(
            entry.name, options, entry.part(), entry.metric is not None, self._metric_path(entry), entry.updates,
            list_lengths(entry.metric), entry.loaders,
        )  # fmt: skip

    def _compute(self, entry: Entry, of_ranks: list[Summary]) -> float | None:
        """Return the value of a torchmetrics object. It gathers its own states, so all ranks call this or none."""
        metric: Any = entry.metric
        if metric is None and of_ranks[0].path:
            # This rank had no batch in which to log the metric.
            metric = entry.metric = self._module.get_submodule(of_ranks[0].path)
            self._of_other_ranks.append(metric)
        if metric is None:
            return None
        alone = len(of_ranks) < self._group.world.size and not of_ranks[0].path
        own, synced = {name: getattr(metric, name) for name in metric._defaults}, metric._to_sync
        if not alone and would_deadlock(metric, [summary.items for summary in of_ranks], self._group.world.size):
            states = self._group.gather({name: to_device(value, CPU) for name, value in own.items()})
            for name, value in gathered(states, metric._reductions).items():
                setattr(metric, name, to_device(value, metric.device))
            alone = True
        metric._to_sync = synced and not alone
        try:
            return float(metric.compute())
        finally:
            metric._to_sync = synced
            for name, value in own.items():
                setattr(metric, name, value)

    def _over_ranks(self, entries: list[Entry], values: list[float], sync: bool) -> list[float]:
        """Return the values of a step. Those with `sync_dist` are reduced over the ranks that have them.

        Without `sync`, they are the reduced values of the last report.
        """
        if sync:
            mine = {entry.name: value for entry, value in zip(entries, values, strict=True) if entry.sync_dist}
            everyone = self._group.gather(mine)
            for entry in entries:
                if entry.sync_dist:
                    kind = reduction_name(entry.reduce_fx) or "mean"
                    parts = [Part(ranks[entry.name], 1.0) for ranks in everyone if entry.name in ranks]
                    entry.synced = reduced(kind, merge(kind, parts))
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
            "reduce_fx": reduction_name(entry.reduce_fx),
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
                setattr(entry.metric, key, to_device(value, entry.metric.device) if key != "_update_count" else value)


def _kept(name: str, value: Any) -> Any:
    """Return a snapshot of a value that one of several copies of a module logs, to be recorded later."""
    if is_torchmetric(value):
        raise ConfigError(
            f'self.log("{name}", …): with strategy="replicas" each device has a copy of this torchmetrics object, which '
            'knows its own rows alone. Log a plain value, or use strategy="ddp".'
        )
    check_value(name, value)
    return snapshot_value(value)
