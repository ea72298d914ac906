"""An optimizer's `step` and `zero_grad` without the records that torch makes of them for a profiler.

torch opens and closes a record around both, whether or not a profiler looks: 38 of the 218 µs of a step of a tiny model.
Each function here gives a call that does the same without it, and gives the optimizer's own call wherever there could be
a difference: `step` or `zero_grad` is somebody's own, hooks are registered, a profiler runs. Any of that may change during
training, so it is looked at in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import _profiler_enabled  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_ZERO_GRAD = Optimizer.zero_grad
_RECORDING = Optimizer.profile_hook_step(lambda: None).__code__  # pyright: ignore[reportFunctionMemberAccess]


def stepper(optimizer: Optimizer) -> Callable[[], Any]:
    """What to call in place of `optimizer.step`."""
    recorded = type(optimizer).step
    if getattr(recorded, "__code__", None) is not _RECORDING:
        return lambda: optimizer.step()
    inner = recorded.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    own = vars(optimizer)
    trusted: Any = None  # what stands in place of the class's `step` and may be passed over: nothing, or a scheduler's

    def step() -> Any:
        nonlocal trusted
        replaced = own.get("step")
        if type(optimizer).step is not recorded or any(hooks) or _profiler_enabled():
            return optimizer.step()
        if replaced is trusted:
            return inner(optimizer)
        if _is_schedulers(replaced, recorded):
            trusted = replaced  # it notes that a step was made: this one is enough
        return optimizer.step()

    return step


def _is_schedulers(step: Any, recorded: Any) -> bool:
    """Whether a scheduler has put `step` in place of the class's own, and of nothing else."""
    file = getattr(getattr(step, "__code__", None), "co_filename", "")
    return file == lr_scheduler.__file__ and getattr(step, "__wrapped__", None) is recorded


def clearer(optimizer: Optimizer) -> Callable[[], Any]:
    """What to call in place of `optimizer.zero_grad`."""
    own = vars(optimizer)

    def clear() -> None:
        if type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in own:
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return clear
