"""The metrics of a process that has several logical ranks: one `MetricLog` for each, merged in the order of logical ranks.

What `self.log` gets while the code of a logical rank runs belongs to that rank. A value that is logged between them, in a
hook that runs once on each process, counts once for each logical rank. So an epoch's value has as many parts, in the same
order, on any number of processes.

Between two reports, `trainer.callback_metrics` has the values of the last report: of all logical ranks for names that were
logged with `sync_dist=True`, and of the lowest logical rank that has logged it for any other name. These values are the
same on all processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from footplate.core.errors import ConfigError
from footplate.distributed.group import ALONE, Group
from footplate.distributed.metric_reduction import Part, merge, reduced
from footplate.distributed.replica_logs import Logged
from footplate.training.metrics.entry import Entry, Values
from footplate.training.metrics.host_values import to_floats
from footplate.training.metrics.logging_checks import reduction_name
from footplate.training.metrics.metric_log import MetricLog
from footplate.training.metrics.torchmetrics_objects import is_torchmetric


class LogicalMetricLog(MetricLog):
    """See the module's docstring.

    Args:
        module: the user's module.
        by_step: see `MetricLog`.
        ranks: how many logical ranks this process has.
        group: the processes.
    """

    def __init__(self, module: nn.Module, by_step: bool, ranks: int, group: Group = ALONE) -> None:
        self.of_ranks = [MetricLog(module, by_step) for _ in range(ranks)]
        self._current: list[MetricLog] = self.of_ranks
        self._reported: dict[str, tuple[Entry, float]] = {}
        super().__init__(module, by_step, group)

    def enter(self, position: int | None) -> None:
        """Let values count for the logical rank at this position, or with None, for each of this process."""
        self._current = self.of_ranks if position is None else [self.of_ranks[position]]

    def record(self, call: Logged) -> None:
        if is_torchmetric(call.value):
            raise ConfigError(
                f'self.log("{call.name}", …): a torchmetrics object has one state for all logical ranks of a process, so '
                "its value would depend on the number of processes. Log plain values, or leave logical_ranks out."
            )
        for log in self._current:
            log.record(call)

    def begin_batch(self, batch: Any) -> None:
        for log, own_batch in zip(self.of_ranks, batch, strict=True):
            log.begin_batch(own_batch)

    def end_batch(self) -> None:
        for log in self.of_ranks:
            log.end_batch()

    def take_back(self) -> None:
        for log in self.of_ranks:
            log.take_back()

    def step_values(self, sync: bool = False) -> Values:
        if sync:
            self._report(self._gathered([_latest(log) for log in self.of_ranks]))
        result = Values()
        for entry, value in self._reported.values():
            result.add(entry, entry.step_name, value)
        return result

    def _report(self, latest: list[dict[str, tuple[Entry, float]]]) -> None:
        """Keep the values of a step: reduced over the logical ranks, or of the first that has logged the name."""
        self._reported = {}
        for name in dict.fromkeys(name for of_rank in latest for name in of_rank):
            entries = [of_rank[name] for of_rank in latest if name in of_rank]
            entry, value = entries[0]
            if entry.sync_dist:
                kind = reduction_name(entry.reduce_fx) or "mean"
                value = reduced(kind, merge(kind, [Part(value, 1.0) for _, value in entries]))
                assert value is not None
            self._reported[name] = entry, value

    def epoch_values(self) -> Values:
        result = Values()
        summaries = [
            {entry.name: log._summary(entry) for entry in log._entries.values() if entry.on_epoch}
            for log in self.of_ranks
        ]
        everyone = self._gathered(summaries)
        for name in dict.fromkeys(name for of_rank in everyone for name in of_rank):
            of_ranks = [of_rank[name] for of_rank in everyone if name in of_rank]
            own = [log._entries[name] for log in self.of_ranks if name in log._entries]
            entry = own[0] if own else of_ranks[0].entry()
            entry.loaders = set().union(*(summary.loaders for summary in of_ranks))
            value = reduced(entry.reduce_fx, merge(entry.reduce_fx, [summary.part for summary in of_ranks]))
            for own_entry in own:
                own_entry.reset()
                # From now on, the plain name gives the epoch's value.
                own_entry.latest = None
            self._reported.pop(name, None)
            if value is not None:
                result.add(entry, entry.epoch_name, value)
        return result

    def forget_latest(self) -> None:
        self._reported.clear()
        for log in self.of_ranks:
            log.forget_latest()

    def clear(self) -> None:
        self._reported.clear()
        for log in self.of_ranks:
            log.clear()

    def names(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for log in self.of_ranks for name in log.names()))

    def state_dict(self) -> Any:
        """The states of this process's logical ranks, in their order."""
        return [log.state_dict() for log in self.of_ranks]

    def load_state_dict(self, state: Any) -> None:
        self._reported.clear()
        for log, of_rank in zip(self.of_ranks, state, strict=True):
            log.load_state_dict(of_rank)

    def _gathered(self, own: list[Any]) -> list[Any]:
        """Return a value of each logical rank, in their order, on all processes."""
        return [of_rank for of_process in self._group.gather(own) for of_rank in of_process]

    # Attributes that the loops set apply to the current logical ranks.

    @property
    def by_step(self) -> bool:
        return self._current[0].by_step

    @by_step.setter
    def by_step(self, value: bool) -> None:
        for log in self._current:
            log.by_step = value

    @property
    def counts(self) -> bool:
        return self._current[0].counts

    @counts.setter
    def counts(self, value: bool) -> None:
        for log in self._current:
            log.counts = value

    @property
    def batch(self) -> Any:
        return self._current[0].batch

    @batch.setter
    def batch(self, value: Any) -> None:
        for log in self._current:
            log.batch = value

    @property
    def dataloader_idx(self) -> int | None:
        return self._current[0].dataloader_idx

    @dataloader_idx.setter
    def dataloader_idx(self, value: int | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        for log in self._current:
            log.dataloader_idx = value


def _latest(log: MetricLog) -> dict[str, tuple[Entry, float]]:
    """Return the latest value of every name of a logical rank that is reported by step, with a plain entry to send."""
    entries = [entry for entry in log._entries.values() if entry.on_step and entry.has_latest]
    values = to_floats(entry.latest for entry in entries)
    return {
        entry.name: (log._summary(entry).entry() if callable(entry.reduce_fx) else _bare(entry), value)
        for entry, value in zip(entries, values, strict=True)
    }


def _bare(entry: Entry) -> Entry:
    """Return an entry with the options of another, without values."""
    return Entry(
        entry.name, entry.on_step, entry.on_epoch, entry.prog_bar, entry.logger, entry.reduce_fx, entry.sync_dist,
        loaders=entry.loaders,
    )  # fmt: skip
