"""Steps of learning-rate schedulers, by optimizer step and by epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from footplate.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from footplate.training.run import Run


def step_schedulers(run: Run, interval: str, plateau: bool) -> None:
    """Step the schedulers that are due. With manual optimisation, the module steps them itself.

    Args:
        run: the run whose schedulers to step.
        interval: "step" or "epoch".
        plateau: step the schedulers that read a metric. Otherwise, step all others.

    Raises:
        ConfigError: a scheduler monitors a metric that has not been logged.
    """
    if not run.module.automatic_optimization:
        return
    now = run.progress.global_step if interval == "step" else run.progress.epoch + 1
    for config in run.lr_scheduler_configs:
        if config.interval != interval or config.reduce_on_plateau != plateau or now % config.frequency:
            continue
        if not config.reduce_on_plateau:
            run.module.lr_scheduler_step(config.scheduler, None)
            continue

        # Rank 0's value counts, so that all ranks set the same learning rate.
        value = run.group.from_first(run.latest_metrics().get(config.monitor or ""))
        if value is not None:
            run.module.lr_scheduler_step(config.scheduler, torch.tensor(value))
        elif config.strict:
            raise ConfigError(
                f'{type(config.scheduler).__name__} monitors "{config.monitor}", which has not been logged. '
                f"{did_you_mean(config.monitor or '', run.reports.callback)}"
            )
