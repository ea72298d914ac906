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

_USES = (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "floordiv",
    "rfloordiv",
    "mod",
    "rmod",
    "divmod",
    "rdivmod",
    "pow",
    "rpow",
    "and",
    "rand",
    "or",
    "ror",
    "xor",
    "rxor",
    "lshift",
    "rlshift",
    "rshift",
    "rrshift",
    "neg",
    "pos",
    "abs",
    "invert",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "bool",
    "int",
    "float",
    "index",
    "hash",
    "round",
    "trunc",
    "floor",
    "ceil",
    "str",
    "repr",
    "format",
)


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
    setattr(Counter, f"__{_use}__", _refusing(f"__{_use}__"))


class CounterWatch(TorchFunctionMode):
    """Refuses counters among the arguments of torch's functions, which read them without asking Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in (*args, *(kwargs or {}).values()):
            if isinstance(argument, Counter):
                argument.refuse()
        return func(*args, **(kwargs or {}))
