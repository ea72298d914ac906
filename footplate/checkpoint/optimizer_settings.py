"""Settings of optimizers when a training begins from a checkpoint of another training, such as a trial of a tuning.

A resumed run takes everything from its checkpoint. A training that *begins* from a checkpoint takes what training has made
(weights, moments, counts, progress), but its own hyperparameters decide what they decide: learning rate, momentum, weight
decay, and the course of the schedulers. A checkpoint has both kinds of values in the same places, the parameter groups and
the states of schedulers. These rules separate them:

    the checkpoint has    `optimizer_settings`: the groups as `configure_optimizers` returned them    base
                          the groups as training has left them                                        saved
    the new training has  the groups as `configure_optimizers` returned them                          own

1. A scheduler isn't loaded. The new one makes as many steps as the saved one has made, from its own groups. So it sets
   what it would have set at this point of a training from the first step. Warm-ups, cycles and chains need no rules.
2. A value that no scheduler sets is `saved` if it was configured alike (own = base), since training may have changed it:
   by hand, by a callback, or as a count that some optimizers keep in their groups. Otherwise it is `own`.
3. `ReduceLROnPlateau` depends on metrics, so its steps can't be repeated. It keeps the best value and its counts. The
   learning rate is reduced as it was: own · saved / base.

So a training with the hyperparameters of the checkpoint goes on bit for bit. What can't be told apart is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from footplate.core.errors import CheckpointError
from footplate.step.optimizers import SchedulerConfig

Settings = list[dict[str, Any]]
"""The values of each parameter group of an optimizer, without its parameters."""

# Values that a scheduler sets, although they may be at their first value now.
_SCHEDULED = ("lr", "momentum", "betas")
# The progress of a ReduceLROnPlateau. Its other attributes are settings.
_PLATEAU = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """Copy the values of an optimizer's parameter groups."""
    return [
        {name: _copied(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def keep_own_settings(
    state: dict[str, Any],
    source: str,
    optimizers: Sequence[torch.optim.Optimizer],
    own: Sequence[Settings],
    schedulers: Sequence[SchedulerConfig],
    steps: Sequence[int | None],
) -> None:
    """Set the parameter groups and schedulers of a training that begins from a checkpoint.

    Args:
        state: the checkpoint's state.
        source: its name, for errors.
        optimizers: the new optimizers, with the checkpoint's state.
        own: their groups, as they were configured.
        schedulers: the new schedulers, as they were configured.
        steps: the steps that each scheduler would have made by now; None if that isn't known.

    Raises:
        CheckpointError: the checkpoint doesn't tell the settings of its optimizers; the groups have changed in training; a
            scheduler can't repeat its steps.
    """
    if "optimizer_settings" not in state:
        raise CheckpointError(
            f"{source} doesn't tell how its optimizers were configured, so no training with other hyperparameters can "
            "begin from it. Resume it with this version of Footplate, save, and use the new checkpoint."
        )
    courses = list(zip(schedulers, state["lr_schedulers"], steps, strict=True))
    for optimizer, configured, base in zip(optimizers, own, state["optimizer_settings"], strict=True):
        name = f"{source}: {type(optimizer).__name__}"
        if not len(optimizer.param_groups) == len(configured) == len(base):
            raise CheckpointError(
                f"{name} has {len(base)} parameter groups at the beginning of its training, "
                f"{len(optimizer.param_groups)} in the checkpoint, and {len(configured)} as configured now. A training "
                "with other hyperparameters can begin only from a checkpoint with the same groups."
            )
        drivers = [each for each in courses if getattr(each[0].scheduler, "optimizer", optimizer) is optimizer]
        if len(drivers) > 1:
            raise CheckpointError(
                f"{name} has {len(drivers)} learning-rate schedulers, so what each of them has set isn't known. Chain "
                "them to one (SequentialLR, ChainedScheduler)."
            )

        # The scheduler makes its steps in groups as they were configured.
        saved = settings_of(optimizer)
        for group, values in zip(optimizer.param_groups, configured, strict=True):
            group.update({key: _copied(value) for key, value in values.items()})
        scheduler = drivers[0][0].scheduler if drivers else None
        for _, saved_course, made in drivers:
            _bring_up(scheduler, saved_course, made, source)
        for group, values, before, after in zip(optimizer.param_groups, configured, base, saved, strict=True):
            _settle(group, values, before, after, scheduler)
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler._last_lr = [_copied(group["lr"]) for group in optimizer.param_groups]


def _settle(
    group: dict[str, Any], own: dict[str, Any], base: dict[str, Any], saved: dict[str, Any], scheduler: Any
) -> None:
    """Set the values of a parameter group, in which its scheduler has made its steps."""
    is_plateau = isinstance(scheduler, ReduceLROnPlateau)
    for key, value in own.items():
        if scheduler is not None and not is_plateau and (key in _SCHEDULED or not _same(group[key], value)):
            continue
        if key in base and _same(value, base[key]):
            group[key] = saved[key]
        elif key == "lr" and is_plateau and base.get(key):
            group[key] = value * (saved[key] / base[key])


def _bring_up(scheduler: Any, saved: dict[str, Any], steps: int | None, source: str) -> None:
    """Bring a new scheduler to where the saved one is.

    Raises:
        CheckpointError: it can't be brought there.
    """
    name = f"{source}: {type(scheduler).__name__}"
    if isinstance(scheduler, ReduceLROnPlateau) != ("num_bad_epochs" in saved):
        raise CheckpointError(
            f"{name} can't take the place of another kind of learning-rate scheduler: one of both depends on a metric."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        for attribute in _PLATEAU:
            setattr(scheduler, attribute, saved[attribute])
        return
    made = _steps_made(saved)
    if not isinstance(scheduler, LRScheduler) or made is None:
        raise CheckpointError(
            f"{name} can't repeat the steps of the checkpoint's training, since it isn't one of torch. A training with "
            "other hyperparameters can't begin from this checkpoint."
        )
    if steps is not None and steps != made:
        raise CheckpointError(
            f"{name} would have made {steps} steps by now, and in the checkpoint it has made {made}. Keep its interval and "
            "frequency."
        )
    with warnings.catch_warnings():
        # It steps without its optimizer.
        warnings.simplefilter("ignore")
        try:
            for _ in range(made - (_steps_made(scheduler.state_dict()) or 0)):
                scheduler.step()
        except ValueError as error:
            raise CheckpointError(f"{name} can't make the {made} steps of the checkpoint: {error}") from error


def _steps_made(state: dict[str, Any]) -> int | None:
    """The steps that a scheduler has made, by its state; None if that doesn't tell. A chain is as far as its first part."""
    if "last_epoch" in state:
        return int(state["last_epoch"])
    parts = state.get("_schedulers")
    return _steps_made(parts[0]) if parts else None


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(value).cpu(), torch.as_tensor(other).cpu()))
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return list(value) == list(other)
    return bool(value == other)
