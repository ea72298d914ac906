"""Optimizers and schedulers from `configure_optimizers`.

A module may return them in several forms. `configure` turns each form into a list of optimizers and a list of scheduler
configurations.

return optimizer
return [optimizer_1, optimizer_2]                                   manual optimisation
return [optimizer], [scheduler]                                     two lists
return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}
return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
return ({"optimizer": …, "lr_scheduler": …}, {"optimizer": …})      a tuple or list of such dicts
return None                                                         nothing is optimised
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from footplate.core.errors import ConfigError, did_you_mean
from footplate.step.torch_internals import delay_compiler


@dataclass
class SchedulerConfig:
    """A learning-rate scheduler, and the times of its steps.

    Attributes:
        scheduler: the scheduler.
        interval: "epoch" or "step" (optimizer steps).
        frequency: the number of intervals between two steps.
        monitor: the metric for `ReduceLROnPlateau`.
        strict: a missing `monitor` is an error; otherwise the scheduler doesn't step.
        name: its name in the logs of `LearningRateMonitor`.
        reduce_on_plateau: the scheduler's `step` takes the monitored metric.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False


def configure(module: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Call a module's `configure_optimizers`; return its optimizers and schedulers.

    Raises:
        ConfigError: an unknown form, a scheduler of an optimizer that wasn't returned, or a missing `monitor`.
    """
    delay_compiler()
    returned = module.configure_optimizers()
    optimizers, schedulers, monitor = _parse(returned, type(module).__name__)
    configs = [_scheduler_config(scheduler, monitor) for scheduler in schedulers]
    for config in configs:
        if config.reduce_on_plateau and config.monitor is None and module.automatic_optimization:
            raise ConfigError(
                f"configure_optimizers(): {type(config.scheduler).__name__} needs to know what to watch: return "
                '{"optimizer": …, "lr_scheduler": {"scheduler": …, "monitor": "val_loss"}}.'
            )
        owner = getattr(config.scheduler, "optimizer", None)
        if owner is not None and not any(owner is optimizer for optimizer in optimizers):
            raise ConfigError(
                f"configure_optimizers(): {type(config.scheduler).__name__} drives an optimizer that was not returned."
            )
    return optimizers, configs


def _parse(returned: Any, module_name: str) -> tuple[list[Optimizer], list[Any], str | None]:
    if returned is None:
        return [], [], None
    if isinstance(returned, Optimizer):
        return [returned], [], None
    if isinstance(returned, dict):
        return _parse_dict(returned)
    if isinstance(returned, (list, tuple)):
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
            second = returned[1] if isinstance(returned[1], (list, tuple)) else [returned[1]]
            return list(returned[0]), list(second), None
        if all(isinstance(item, Optimizer) for item in returned):
            return list(returned), [], None
        if all(isinstance(item, dict) for item in returned):
            parsed = [_parse_dict(item) for item in returned]
            schedulers = [
                _scheduler_config(scheduler, monitor) for _, of_dict, monitor in parsed for scheduler in of_dict
            ]
            return [item[0][0] for item in parsed], schedulers, None
    raise ConfigError(
        f"{module_name}.configure_optimizers() returned {type(returned).__name__}: expected an optimizer, a list of "
        "optimizers, two lists (optimizers, schedulers), a dict with the keys optimizer and lr_scheduler, or a list of "
        "such dicts."
    )


def _parse_dict(returned: dict[str, Any]) -> tuple[list[Optimizer], list[Any], str | None]:
    known = ("optimizer", "lr_scheduler", "monitor")
    for key in returned:
        if key == "frequency":
            raise ConfigError(
                'configure_optimizers(): "frequency" beside an optimizer is gone; alternate the optimizers yourself with '
                "self.automatic_optimization = False."
            )
        if key not in known:
            raise ConfigError(f'configure_optimizers(): unknown key "{key}". {did_you_mean(key, known)}')
    if not isinstance(returned.get("optimizer"), Optimizer):
        raise ConfigError('configure_optimizers(): the dict needs an optimizer under the key "optimizer".')
    scheduler = returned.get("lr_scheduler")
    return [returned["optimizer"]], [] if scheduler is None else [scheduler], returned.get("monitor")


def _scheduler_config(returned: Any, monitor: str | None) -> SchedulerConfig:
    if isinstance(returned, SchedulerConfig):
        return returned
    if isinstance(returned, dict):
        known = list(SchedulerConfig.__dataclass_fields__)
        for key in returned:
            if key not in known:
                raise ConfigError(
                    f'configure_optimizers(): unknown key "{key}" in lr_scheduler. {did_you_mean(key, known)}'
                )
        if "scheduler" not in returned:
            raise ConfigError('configure_optimizers(): the lr_scheduler dict needs the key "scheduler".')
        config = SchedulerConfig(**{"monitor": monitor, **returned})
    else:
        config = SchedulerConfig(returned, monitor=monitor)
    if isinstance(config.frequency, bool) or not isinstance(config.frequency, int) or config.frequency < 1:
        raise ConfigError(f"configure_optimizers(): lr_scheduler frequency={config.frequency!r}: expected 1 or more.")
    if config.interval not in ("step", "epoch"):
        raise ConfigError(
            f'configure_optimizers(): lr_scheduler interval="{config.interval}": expected "step" or "epoch".'
        )
    config.reduce_on_plateau = config.reduce_on_plateau or isinstance(config.scheduler, ReduceLROnPlateau)
    return config


class StepOptimizer:
    """An optimizer as `self.optimizers()` returns it. Its `step()` counts the step, scales gradients and calls the hooks.

    All other attributes are the optimizer's own.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        self.__dict__["_optimizer"] = optimizer
        self.__dict__["_step"] = step

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The optimizer's class, so that `isinstance` in schedulers and asserts accepts this object."""
        return type(self.optimizer)

    @property
    def optimizer(self) -> Optimizer:
        """The wrapped optimizer."""
        return self.__dict__["_optimizer"]

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """Make an optimizer step, which counts as a global step. The optimizer's own `step` gets the other arguments."""
        return self.__dict__["_step"](self.optimizer, closure, **arguments)

    @contextlib.contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Accept the argument for compatibility, without effect: ranks average gradients just before a step in any case."""
        yield

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.optimizer, name, value)


def wants_closure(optimizer: Optimizer) -> bool:
    """Return True if an optimizer can't step without evaluating the loss again (LBFGS)."""
    return steps_by_closure(type(optimizer))


def may_use_closure(optimizer: Optimizer) -> bool:
    """Return True if an optimizer that isn't torch's may use the optional closure of its `step`, as SAM does.

    torch's optimizers call an optional closure once, before anything else, so they don't need it.
    """
    step = inspect.unwrap(type(optimizer).step)
    code = getattr(step, "__code__", None)
    if code is None or (getattr(step, "__module__", None) or "").startswith("torch.optim."):
        return False
    instructions = dis.get_instructions(code)
    return any(instr.argval == "closure" and instr.opname.startswith("LOAD") for instr in instructions)


# Every step calls this function.
@functools.cache
def steps_by_closure(kind: type[Optimizer]) -> bool:
    """Return True if the `step` of a class of optimizers needs a closure."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
