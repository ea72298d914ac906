"""Numbers that change from step to step, and are refused wherever a step uses one.

`batch_idx`, `current_epoch` and `global_step` are plain numbers. A captured step that reads one would keep the value of
the moment of capture for ever, silently: a warm-up that never ends, a schedule that never moves. So while a step is
captured each of them is a `Counter`, an integer that may be handed around, but raises, with the line, when it is computed
with, compared, formatted, or given to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch.overrides import TorchFunctionMode

from footplate.step.capture.refusals import CaptureError, calling_place

_OBJECT = {
    name for name in dir(object) if name not in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__")
}
_TEXT = {"__str__", "__repr__", "__format__"}
_USES = [name for name in dir(int) if name.startswith("__") and name not in _OBJECT - _TEXT | {"__getnewargs__"}]


class Counter(int):
    """An integer that may be passed on, and not used. Its `name` is what the user calls it."""

    name: str

    def __new__(cls, name: str, value: int = 0) -> Counter:
        counter = super().__new__(cls, value)
        counter.name = name
        return counter

    def refuse(self) -> NoReturn:
        """Say who uses it, and what to do instead."""
        raise CaptureError(
            f"{self.name} is used in a step that is captured once, where it would stay what it is now:\n"
            f"    {calling_place()}\n"
            "Keep such a number in a buffer that the step itself advances (self.register_buffer), or do what depends on "
            "it in a hook between steps (on_train_batch_end, on_train_epoch_start)."
        )


def _refusing(name: str) -> Callable[..., Any]:
    def use(self: Counter, *_: Any) -> NoReturn:
        self.refuse()

    use.__name__ = name
    return use


for _use in _USES:
    setattr(Counter, _use, _refusing(_use))


class CountingTrainer:
    """A trainer as a step sees it: whatever it has, but for its counters, which are `Counter`s."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return (
            Counter(f"self.trainer.{name}")
            if name in ("current_epoch", "global_step")
            else getattr(self._trainer, name)
        )


class CounterWatch(TorchFunctionMode):
    """Refuses counters among the arguments of torch's functions, which read them without asking Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in (*args, *(kwargs or {}).values()):
            if isinstance(argument, Counter):
                argument.refuse()
        return func(*args, **(kwargs or {}))
