"""The check, after the first batch, that something logs the metrics that callbacks and schedulers monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from footplate.core.errors import ConfigError, did_you_mean
from footplate.core.hooks import overrides

if TYPE_CHECKING:
    from footplate.training.run import Run

LOGGING_HOOKS = ("on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end", "on_validation_end")


def check_monitors(run: Run, logged: set[str], validated: set[str], val_loaders: list[Any]) -> None:
    """Name a monitored metric that nothing can log, now rather than at the end of the first epoch.

    Rank 0 makes this check, since its values count at the end of an epoch. It knows then what any rank has logged.

    Args:
        run: the run.
        logged: the names that any rank has logged in the first batch.
        validated: the names that the sanity check has logged.
        val_loaders: the validation loaders.

    Raises:
        ConfigError: a callback or a scheduler monitors a metric that nothing logs.
    """
    # Without a sanity check, it isn't known what validation will log.
    if run.config.fast_dev_run or (val_loaders and not validated):
        return
    # Hooks at the end of an epoch, and callbacks of other packages, may log any name later.
    if any(overrides(run.module, name) for name in LOGGING_HOOKS):
        return
    if any(not type(callback).__module__.startswith("footplate.") for callback in run.callbacks):
        return

    known = {*validated, *run.reports.callback}
    for name in logged:
        known |= {name, f"{name}_step", f"{name}_epoch"}
    watchers = [(type(callback).__name__, getattr(callback, "monitor", None)) for callback in run.callbacks]
    watchers += [
        (type(config.scheduler).__name__, config.monitor)
        for config in run.lr_scheduler_configs
        if config.reduce_on_plateau
    ]
    counters = {("ModelCheckpoint", "epoch"), ("ModelCheckpoint", "step")}
    for watcher, monitor in watchers:
        if monitor is not None and monitor not in known and (watcher, monitor) not in counters:
            raise ConfigError(f'{watcher} monitors "{monitor}", which nothing logs. {did_you_mean(monitor, known)}')
